"""Prefiller budgets: which prefiller takes the next probe, and what each one still holds.

A prefiller is charged a request's prompt tokens from its probe until the KV cache has left it: the
first decoded token, or a release. `Prefillers` only counts; the scheduler says when.
"""

from balanceroute.proxy.core.events import PrefillerId


class Prefillers:
    """Probes and KV tokens held on P prefillers.

    Args:
        instances: Number of prefillers, P.
        probe_limit: Probes that may run on one prefiller at a time; None for no limit.
        kv_capacity_tokens: KV tokens that one prefiller may hold; None for no limit. A prompt
            larger than this still goes to an empty prefiller, so that it fails there with the
            engine's own error instead of waiting forever here.
    """

    def __init__(
        self,
        instances: int,
        *,
        probe_limit: int | None = None,
        kv_capacity_tokens: int | None = None,
    ) -> None:
        self.probes = [0] * instances
        self.held_tokens = [0] * instances
        self._probe_limit = probe_limit
        self._kv_capacity_tokens = kv_capacity_tokens

    def choose(self, prompt_tokens: int) -> PrefillerId | None:
        """Return the open prefiller that holds the fewest tokens, or None if all are full."""
        best: int | None = None
        for prefiller, held in enumerate(self.held_tokens):
            if self._open(prefiller, prompt_tokens) and (
                best is None or held < self.held_tokens[best]
            ):
                best = prefiller
        return None if best is None else PrefillerId(best)

    def begin_probe(self, prefiller: PrefillerId, prompt_tokens: int) -> None:
        """Charge one probe."""
        self.probes[prefiller] += 1
        self.held_tokens[prefiller] += prompt_tokens

    def correct(self, prefiller: PrefillerId, *, charged_tokens: int, prompt_tokens: int) -> None:
        """Replace the estimate that a request was charged with by its realised length."""
        self.release(prefiller, charged_tokens)
        self.held_tokens[prefiller] += prompt_tokens

    def end_probe(self, prefiller: PrefillerId) -> None:
        """Note that a probe ended; its tokens stay charged."""
        assert self.probes[prefiller] > 0, f"prefiller {prefiller} has no probe to end"
        self.probes[prefiller] -= 1

    def release(self, prefiller: PrefillerId, prompt_tokens: int) -> None:
        """Uncharge the tokens of a request whose KV cache left the prefiller."""
        assert self.held_tokens[prefiller] >= prompt_tokens, f"prefiller {prefiller} released twice"
        self.held_tokens[prefiller] -= prompt_tokens

    def _open(self, prefiller: int, prompt_tokens: int) -> bool:
        if self._probe_limit is not None and self.probes[prefiller] >= self._probe_limit:
            return False
        held = self.held_tokens[prefiller]
        if self._kv_capacity_tokens is None or held == 0:
            return True
        return held + prompt_tokens <= self._kv_capacity_tokens
