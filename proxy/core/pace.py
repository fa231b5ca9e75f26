"""The measured pace of a deployment: its steps, departures and prefills.

The costs of a lapsed lease and the depth of the pool follow from it (`leases`). The scheduler tells
it, so that the live proxy and the simulator measure in the same way.
"""

from math import exp

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.core.step_model import StepModel

# Steps and prefills that the means cover: with 8 ranks x 16 slots on the Mooncake trace some 400
# departures, and with its prompts ten seconds of a prefiller at 5 us per token.
_WINDOW_STEPS = 1_024
_WINDOW_PREFILLS = 128
# The weights of a full window and of two: 1 - 1/e, 1 - 1/e^2.
_FULL, _TWICE_FULL = 0.63, 0.86


class Pace:
    """Measures one scheduler.

    Args:
        window_ns: Time that the rate of departures covers: of that in which requests wait for a
            rank. In any other time it says what arrives, not what the ranks could serve.

    Attributes:
        step_model: What a token costs in a step.
    """

    def __init__(self, window_ns: int) -> None:
        self.step_model = StepModel()
        self._window_ns = window_ns
        # Departures and the time that they took; both decay.
        self._left = self._span_ns = 0.0
        self._since_ns: int | None = None
        self._waiting = False
        self._steps = self._left_tokens = 0.0
        # Prefills that run, each with its prefiller, its tokens and its start.
        self._running: dict[RequestId, tuple[PrefillerId, int, int]] = {}
        # How many of them each prefiller has that has any.
        self._running_on: dict[PrefillerId, int] = {}
        self._prefilled_tokens = self._prefills = self._prefill_ns = 0.0
        # Time in which each prefiller was busy, summed, and the time that passed; both decay.
        self._busy_ns = self._passed_ns = 0.0
        self._accounted_ns: int | None = None

    def left(self, kv_tokens: int) -> None:
        """Note that a request left its rank, which held `kv_tokens` of it."""
        self._left += self._waiting
        self._left_tokens += kv_tokens

    def step(self, duration_ns: int | None, loads: NDArray[np.int64]) -> None:
        """Note a step of all ranks, and int64[G], their KV tokens after it."""
        self._steps = (1 - 1 / _WINDOW_STEPS) * self._steps + 1
        self._left_tokens *= 1 - 1 / _WINDOW_STEPS
        if duration_ns is not None:
            # A third of what `max` takes.
            self.step_model.observe(loads.item(loads.argmax()), duration_ns)

    def tick(self, now_ns: int, *, waiting: bool) -> None:
        """Note a tick; `waiting` is whether requests wait in the pool after it."""
        if self._since_ns is None:
            self._since_ns = now_ns
        passed_ns = now_ns - self._since_ns if self._waiting else 0
        keep = exp(-passed_ns / self._window_ns)
        self._left *= keep
        # The integral of the weights, so that a steady rate is measured without bias.
        self._span_ns = keep * self._span_ns + self._window_ns * (1 - keep)
        self._since_ns = now_ns
        self._waiting = waiting

    def prefill_began(
        self,
        request: RequestId,
        prefiller: PrefillerId,
        prompt_tokens: int,
        now_ns: int,
    ) -> None:
        """Note a prefill that begins.

        Not of a direct request: it holds its prefiller until it ends, which says nothing about prefills.
        """
        self._account(now_ns)
        self._running[request] = prefiller, prompt_tokens, now_ns
        self._running_on[prefiller] = self._running_on.get(prefiller, 0) + 1

    def prefill_ended(self, request: RequestId, now_ns: int, prompt_tokens: int = 0) -> None:
        """Note that a prefill runs no longer; it has computed `prompt_tokens`, 0 if it was lost."""
        if request not in self._running:
            return
        self._account(now_ns)
        prefiller, _, start_ns = self._running.pop(request)
        others = self._running_on.pop(prefiller) - 1
        if others:
            self._running_on[prefiller] = others
        if not prompt_tokens:
            return
        keep = 1 - 1 / _WINDOW_PREFILLS
        self._prefilled_tokens = keep * self._prefilled_tokens + prompt_tokens
        self._busy_ns *= keep
        self._passed_ns *= keep
        self._prefills = keep * self._prefills + 1
        self._prefill_ns = keep * self._prefill_ns + now_ns - start_ns

    @property
    def departures_per_ns(self) -> float | None:
        """Requests that leave the ranks per ns while others wait; None before a full window."""
        return self._rate(_FULL)

    @property
    def steady_departures_per_ns(self) -> float | None:
        """The same; None before two windows.

        Requests that filled empty ranks together leave late, so the first window counts too few.
        """
        return self._rate(_TWICE_FULL)

    @property
    def tokens_left_per_step(self) -> float | None:
        """KV tokens of the requests that leave the fleet in a step; None if unknown."""
        return self._left_tokens / self._steps if self._steps and self._left_tokens else None

    @property
    def prefill_ns_per_token(self) -> float | None:
        """Time of one prefiller for a token; None before the first prefill."""
        return self._busy_ns / self._prefilled_tokens if self._prefilled_tokens else None

    @property
    def busy_prefillers(self) -> float:
        """Mean number of prefillers that are busy."""
        return self._busy_ns / self._passed_ns if self._passed_ns else 0.0

    @property
    def prefill_ns(self) -> float:
        """Mean time from the start of a prefill to its end; 0 before the first."""
        return self._prefill_ns / self._prefills if self._prefills else 0.0

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens of the prefills that run."""
        return sum(tokens for _, tokens, _ in self._running.values())

    def _rate(self, least_weight: float) -> float | None:
        known = self._span_ns > least_weight * self._window_ns
        return self._left / self._span_ns if known else None

    def _account(self, now_ns: int) -> None:
        """Count the time of the prefillers that were busy until now."""
        passed_ns = 0 if self._accounted_ns is None else now_ns - self._accounted_ns
        self._busy_ns += len(self._running_on) * passed_ns
        self._passed_ns += passed_ns
        self._accounted_ns = now_ns
