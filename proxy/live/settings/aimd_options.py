"""The settings of the limit on requests in flight."""

from dataclasses import dataclass, replace

from balanceroute.proxy.core.admission import POST_4, POST_5, AimdSettings
from balanceroute.proxy.live.settings.setting import choice, integer, number, words

_PRESETS: dict[str, AimdSettings | None] = {"off": None, "post5": POST_5, "post4": POST_4}
# Of a request before prefill: with the limit half of the target, and what `post4` goes with.
_TIMEOUT_SHARE = 0.5
_POST_4_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdOptions:
    """A limit on the requests in flight; see `AimdSettings`. None is the preset's own."""

    aimd: str = choice(
        "off",
        "limit the requests in flight per open rank, prefill and pool included, and move the limit "
        "by the p99 time to first token: post5 multiplies, post4 subtracts",
        words(_PRESETS),
    )
    aimd_ttft_s: float = number(2.0, "target of the p99 time to first token", 0.001, 1e6)
    aimd_tpot_ms: float | None = number(
        None, "a target of the p95 time of a decode step too", 0.001, 1e6, word="none"
    )
    aimd_min: int | None = integer(
        None,
        "the least limit; that of --aimd-max fixes it",
        1,
        10**6,
        shown_default="32; 16 with post4",
        word="auto",
    )
    aimd_max: int | None = integer(
        None,
        "the largest limit",
        1,
        10**6,
        shown_default="256; 128 with post4",
        word="auto",
    )

    @property
    def settings(self) -> AimdSettings | None:
        """The controller's settings; None without a limit."""
        preset = _PRESETS[self.aimd]
        if preset is None:
            return None
        low = self.aimd_min or min(preset.cap_min, self.aimd_max or preset.cap_min)
        high = self.aimd_max or max(preset.cap_max, low)
        tpot_ms = self.aimd_tpot_ms
        return replace(
            preset,
            target_ns=round(1e9 * self.aimd_ttft_s),
            tpot_target_ns=None if tpot_ms is None else round(1e6 * tpot_ms),
            cap_min=low,
            cap_max=high,
            cap_initial=min(max(preset.cap_initial, low), high),
        )

    @property
    def queue_ttl_s(self) -> float | None:
        """How long requests wait before prefill unless that is set; None without a limit."""
        if self.aimd == "off":
            return None
        return _POST_4_TIMEOUT_S if self.aimd == "post4" else _TIMEOUT_SHARE * self.aimd_ttft_s

    def too_long(self, queue_ttl_s: float, pool_ttl_s: float | None) -> str | None:
        """Return why the target cannot be kept, if requests may wait for longer than it.

        Args:
            queue_ttl_s: How long before prefill.
            pool_ttl_s: How long after it for the first token; None if they do not.
        """
        if self.aimd == "off" or queue_ttl_s + (pool_ttl_s or 0.0) <= self.aimd_ttft_s:
            return None
        pool = "" if pool_ttl_s is None else f" + --pool-ttl-s ({pool_ttl_s:g})"
        return (
            f"requests may wait for longer than --aimd-ttft-s ({self.aimd_ttft_s:g}): --queue-ttl-s "
            f"({queue_ttl_s:g}){pool}"
        )
