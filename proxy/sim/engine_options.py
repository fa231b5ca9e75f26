"""What engines may do beyond one token per request and step on equal ranks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines differ from plain ones. The lists are repeated over the ranks; empty is equal ranks.

    Attributes:
        rank_speeds: How fast each rank reads its KV cache, relative to b of the step time.
        rank_batches: Batch limit of each rank, instead of the one of all.
        tokens_per_step: Mean tokens that a request emits in a step (speculative decoding).
        pause_above: A rank pauses requests while the share of the heaviest rank's time that the mean
            rank idles is at least this (vllm-ascend's DyntraLB); None for never.
        speculation_seed: Of the numbers of accepted tokens.

    Raises:
        ConfigError: A value is out of range; the message begins with its name.
    """

    rank_speeds: tuple[float, ...] = ()
    rank_batches: tuple[int, ...] = ()
    tokens_per_step: float = 1.0
    pause_above: float | None = None
    speculation_seed: int = 0

    def __post_init__(self) -> None:
        for name, values, least, most in (
            ("rank_speeds", self.rank_speeds, 1e-3, 1e3),
            ("rank_batches", self.rank_batches, 1, 10**9),
            ("tokens_per_step", (self.tokens_per_step,), 1, 64),
            ("pause_above", () if self.pause_above is None else (self.pause_above,), 1e-3, 1),
        ):
            for value in values:
                if not least <= value <= most:
                    raise ConfigError(f"{name} has {value}, must be from {least:g} to {most:g}")

    def speeds_of(self, ranks: int) -> list[float] | None:
        """Return the speed of each rank; None if they are equal to b."""
        return _repeated(self.rank_speeds, ranks) if self.rank_speeds else None

    def batches_of(self, ranks: int, batch_limit: int) -> list[int]:
        """Return the batch limit of each rank."""
        return _repeated(self.rank_batches or (batch_limit,), ranks)


class Speculation:
    """Draws how many tokens a request emits in a step: one, and the drafts accepted before a rejection.

    Each draft is accepted with one probability, so that the mean is as asked. A request's draws
    depend on the seed, its id and its steps alone.

    Args:
        mean_tokens: Tokens per step, above 1.
        seed: Of the draws.
    """

    def __init__(self, mean_tokens: float, seed: int) -> None:
        assert mean_tokens > 1.0
        # Twice as many drafts as are accepted on average, as in common deployments.
        self._drafts = ceil(2.0 * (mean_tokens - 1.0))
        self._accepted = _acceptance(mean_tokens - 1.0, self._drafts)
        self._seed = seed
        self._draws: dict[RequestId, random.Random] = {}

    def draw(self, request: RequestId) -> int:
        """Return the tokens of a request's next step."""
        if request not in self._draws:
            self._draws[request] = random.Random(f"{self._seed}/{request}")
        draw = self._draws[request]
        tokens = 1
        while tokens <= self._drafts and draw.random() < self._accepted:
            tokens += 1
        return tokens

    def forget(self, request: RequestId) -> None:
        """Drop what is kept of a request."""
        self._draws.pop(request, None)


def paused(
    batches: Sequence[Mapping[RequestId, float]],
    *,
    step_base_ns: float,
    step_ns_per_token: float,
    pause_above: float,
) -> list[RequestId]:
    """Return the requests to pause in a step, as vllm-ascend's DyntraLB would.

    While the idle share of the mean rank is at least `pause_above`, the heaviest rank pauses the
    request without which the batch emits most tokens per second; it stops when no pause adds any.
    Every step is planned anew, so a request goes on once that pays. DyntraLB's exchange of running
    for waiting requests of one rank is left out.

    Source: https://github.com/vllm-project/vllm-ascend, vllm_ascend/patch/platform/
    patch_dyntra_lb_core.py at 0b98b7e6bd45.

    Args:
        batches: By rank, the load of each running request: KV tokens / speed.
        step_base_ns: a of T = a + b x max load.
        step_ns_per_token: b.
        pause_above: Share of the heaviest rank's load.
    """
    active = [dict(batch) for batch in batches]
    loads = [sum(batch.values()) for batch in active]
    running = sum(map(len, active))
    stopped: list[RequestId] = []
    while running > 1:
        heaviest = max(loads)
        if heaviest - sum(loads) / len(loads) < pause_above * heaviest:
            break
        rank = loads.index(heaviest)
        others = max((load for one, load in enumerate(loads) if one != rank), default=0.0)
        # The largest one that does not bring the rank below the second heaviest frees most; a larger
        # one frees no more. So the best is the smallest of those that reach it, or else the largest.
        batch = active[rank]
        reach = [one for one in batch if heaviest - batch[one] <= others]
        best = min(reach, key=batch.__getitem__) if reach else max(batch, key=batch.__getitem__)
        before_ns = step_base_ns + step_ns_per_token * heaviest
        after_ns = step_base_ns + step_ns_per_token * max(heaviest - batch[best], others)
        if (running - 1) / after_ns <= running / before_ns:
            break
        loads[rank] -= batch.pop(best)
        running -= 1
        stopped.append(best)
    return stopped


def _repeated(values: Sequence[_Value], ranks: int) -> list[_Value]:
    return [values[rank % len(values)] for rank in range(ranks)]


def _acceptance(mean_accepted: float, drafts: int) -> float:
    """Return the probability with which each of `drafts` has to be accepted; to 2**-40."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if sum(middle**accepted for accepted in range(1, drafts + 1)) < mean_accepted:
            low = middle
        else:
            high = middle
    return high
