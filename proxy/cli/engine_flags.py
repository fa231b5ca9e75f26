"""The flags of engines that are not plain, for `simulate` and `emulate`."""

from dataclasses import dataclass

from balanceroute.proxy.lab.sim.engines import EngineOptions
from balanceroute.proxy.settings.setting import integer, integers, number, numbers, part


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """How the decode ranks differ from plain ones."""

    rank_speeds: tuple[float, ...] = numbers(
        "how fast each rank reads its KV cache, relative to b; repeated over the ranks",
        1e-3,
        1e3,
        metavar="X[,X..]",
    )
    rank_batches: tuple[int, ...] = integers(
        "batch limit of each rank, repeated over the ranks", 1, 10**9, metavar="B[,B..]"
    )
    tokens_per_step: float = number(
        1.0, "mean tokens that a request emits in a step, by speculative decoding", 1, 64
    )
    speculation_seed: int = integer(0, "of the accepted tokens", -(1 << 63), (1 << 63) - 1)
    pause_above: float | None = number(
        None,
        "share of its time that the mean rank idles at the barrier, from which the heaviest rank "
        "pauses requests, as with DyntraLB",
        1e-3,
        1,
        shown_default="never",
    )

    @property
    def options(self) -> EngineOptions:
        """What the flags say."""
        return part(EngineOptions, self)
