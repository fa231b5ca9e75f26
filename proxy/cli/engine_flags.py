"""The flags of engines that are not plain, for `simulate` and `emulate`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.settings.setting import flag_of, integer, number, text
from balanceroute.proxy.sim.engine_options import EngineOptions

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """How the decode ranks differ from plain ones."""

    rank_speeds: str | None = text(
        None,
        "how fast each rank reads its KV cache, relative to b; repeated over the ranks",
        metavar="X[,X..]",
    )
    rank_batches: str | None = text(
        None, "batch limit of each rank, repeated over the ranks", metavar="B[,B..]"
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
        """What the flags say.

        Raises:
            ConfigError: A list has something else than numbers, or one that is out of range.
        """
        speeds = _listed("rank_speeds", self.rank_speeds, float)
        batches = _listed("rank_batches", self.rank_batches, int)
        try:
            return EngineOptions(
                rank_speeds=speeds,
                rank_batches=batches,
                tokens_per_step=self.tokens_per_step,
                pause_above=self.pause_above,
                speculation_seed=self.speculation_seed,
            )
        except ConfigError as error:
            name, rest = str(error).split(" ", 1)
            raise ConfigError(f"{flag_of(name)} {rest}") from None


def _listed(name: str, value: str | None, number_of: Callable[[str], _Value]) -> tuple[_Value, ...]:
    try:
        return () if value is None else tuple(map(number_of, value.split(",")))
    except ValueError:
        raise ConfigError(f"{flag_of(name)} is {value!r}, must be numbers with commas") from None
