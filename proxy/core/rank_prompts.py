"""The prompts that ranks compute: since when, and which others at the same time.

All ranks step together, so a step takes as long as the rank that computes longest, and the others wait for
it. So how long a prompt takes is known only if its rank computes nothing else, and is that rank.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from balanceroute.proxy.core.events import RankId, RequestId


@dataclass(slots=True)
class RankPrompt:
    """A prompt that a rank computes.

    Attributes:
        rank: The rank.
        compute_ns: How long that should take.
        begun_ns: When the step began in which it is computed.
        others_ns: By rank, how long others take that are computed at the same time.
    """

    rank: RankId
    compute_ns: float
    begun_ns: int
    others_ns: defaultdict[RankId, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def longest_ns(self) -> float:
        """How long the rank takes that computes longest."""
        own_ns = self.others_ns.get(self.rank, 0.0) + self.compute_ns
        return max([own_ns, *self.others_ns.values()])

    @property
    def decides(self) -> bool:
        """Whether that is due to this prompt alone."""
        return self.longest_ns == self.compute_ns


class RankPrompts:
    """Those between their admission and their first token."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, RankPrompt] = {}  # For the end of the step that runs.
        self._begun: dict[RequestId, RankPrompt] = {}
        self._step_end_ns = -1

    def add(self, request: RequestId, rank: RankId, compute_ns: float, now_ns: int) -> None:
        """Note that a rank gets a request."""
        # At the end of a step it is in time for the next one.
        among = self._begun if now_ns == self._step_end_ns else self._waiting
        among[request] = RankPrompt(rank, compute_ns, now_ns)

    def longer_ns(self, compute_ns: float, rank: RankId | None = None) -> float:
        """Return by how much the next step is longer if a rank computes one more prompt.

        Args:
            compute_ns: How long that takes.
            rank: None for one that computes nothing else.
        """
        sums_ns: defaultdict[RankId, float] = defaultdict(float)
        for prompt in self._waiting.values():
            sums_ns[prompt.rank] += prompt.compute_ns
        own_ns = compute_ns if rank is None else compute_ns + sums_ns[rank]
        return max(0.0, own_ns - max(sums_ns.values(), default=0.0))

    def step(self, now_ns: int) -> None:
        """Note the end of a step."""
        self._step_end_ns = now_ns
        for prompt in self._waiting.values():
            prompt.begun_ns = now_ns
        self._begun |= self._waiting
        self._waiting.clear()

    def end(self, request: RequestId, now_ns: int) -> RankPrompt | None:
        """Note the first token, or that it does not come; None if no rank computes its prompt."""
        # It may still wait: if no step ran, it began at once.
        ended = self._waiting.pop(request, None) or self._begun.pop(request, None)
        if ended is not None:
            for other in self._begun.values():
                if other.begun_ns < now_ns:
                    other.others_ns[ended.rank] += ended.compute_ns
                    ended.others_ns[other.rank] += other.compute_ns
        return ended
