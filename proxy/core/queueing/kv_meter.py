"""`kv-token-seconds`: what a request holds on a decode rank, in KV tokens times seconds.

A request of s prompt tokens that emits o tokens in steps of T seconds holds about (s o + o^2 / 2) T
for each of its sequences. When it starts, o is what was predicted, or else the mean of the outputs so
far, and T the mean of the steps so far. When it ends, what it held is known: its KV tokens at the
start and at the end, times the measured time of the steps between.
"""

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.fair import FairShares

_NS_PER_S = 1e9
# Before the first step and the first end. Settlement corrects it.
_FIRST_STEP_S = 0.05
_FIRST_OUTPUT = 128.0
# Weights in the running means, which so cover about 64 steps and 128 requests.
_STEP_WEIGHT = 1 / 64
_OUTPUT_WEIGHT = 1 / 128


class KvMeter:
    """Expects and measures what requests hold.

    Attributes:
        shares: Charged with what is expected, settled with what is measured.
    """

    def __init__(self) -> None:
        self.shares = FairShares(self.expected, settles=True)
        self._step_s = 0.0
        self._output = 0.0
        # The time of all steps, and for each request in decode that time and its tokens when it began.
        self._elapsed_s = 0.0
        self._began: dict[RequestId, tuple[float, int]] = {}

    def expected(self, ticket: Ticket) -> float:
        """Return what a request is expected to hold, in KV token-seconds; above 0."""
        output = float(ticket.predicted_tokens) or self._output or _FIRST_OUTPUT
        if ticket.max_tokens is not None:
            output = min(output, max(1.0, ticket.max_tokens))
        tokens = ticket.prompt_tokens * output + output * output / 2
        return ticket.slots * tokens * (self._step_s or _FIRST_STEP_S)

    @property
    def unsettled(self) -> int:
        """Requests that were charged, or joined a batch, and have not ended."""
        return len(self.shares.unsettled | self._began.keys())

    def step(self, duration_ns: int | None) -> None:
        """Note a step; one that was not measured took as long as the others."""
        if duration_ns is None:
            self._elapsed_s += self._step_s or _FIRST_STEP_S
            return
        step_s = duration_ns / _NS_PER_S
        self._elapsed_s += step_s
        self._step_s += _STEP_WEIGHT * (step_s - self._step_s) if self._step_s else step_s

    def begin(self, request: RequestId, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` joined its rank's batch."""
        self._began[request] = self._elapsed_s, kv_tokens

    def end(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request left its rank with `kv_tokens`, or ended before it joined a batch."""
        self.shares.settle(request, ticket.tenant, self._held(request, ticket.slots, kv_tokens))

    def end_direct(self, request: RequestId, ticket: Ticket) -> None:
        """Note the end of a request that held no rank: what it was charged stands for its cost."""
        self.shares.settle(request, ticket.tenant, None)

    def _held(self, request: RequestId, slots: int, kv_tokens: int) -> float:
        began = self._began.pop(request, None)
        if began is None:
            return 0.0
        since_s, before = began
        output = (kv_tokens - before) / slots
        self._output += _OUTPUT_WEIGHT * (output - self._output) if self._output else output
        # It grew by a token a step, so the mean is halfway.
        return (before + kv_tokens) / 2 * (self._elapsed_s - since_s)
