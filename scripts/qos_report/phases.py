"""What each tenant asks for, and when."""

import random
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.lab.replay.requests import PlannedRequest

WEIGHTS = {"gold": 2, "silver": 1}
# What each tenant asks for, as a multiple of what the engines can do.
PHASES = {
    "both backlogged": (1.0, 1.0),
    "gold left": (0.0, 1.5),
    "overload": (3.0, 3.0),
    "recovery": (0.3, 0.3),
}
RANKS, BATCH = 4, 8
PROMPT_TOKENS, OUTPUT_TOKENS = (200, 1000), (20, 60)
# The begin of a phase still sees requests of the one before.
SETTLING = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """How long the phases are, and how fast the engines.

    Attributes:
        phase_s: Length of a phase.
        step_ms: Time of a decode step.
        target_s: Of the p99 time to first token.
        seed: Of arrivals and lengths.
        out: Where to write.
    """

    phase_s: float
    step_ms: float
    target_s: float
    seed: int
    out: Path

    @property
    def capacity(self) -> float:
        """Requests per second that the ranks can do, with full batches."""
        return RANKS * BATCH / (1e-3 * self.step_ms * sum(OUTPUT_TOKENS) / 2)

    def window(self, phase: int) -> tuple[float, float]:
        """Return the seconds in which a phase is measured."""
        return (phase + SETTLING) * self.phase_s, (phase + 1) * self.phase_s

    def phase_of(self, request: PlannedRequest) -> int:
        """Return the phase in which a request is due."""
        # The time is rounded to a nanosecond.
        return int((request.arrival_ns + 1) / 1e9 / self.phase_s)

    def requests(self, tenant: int) -> list[PlannedRequest]:
        """Draw a tenant's requests of all phases; the first is due at 0."""
        rng = random.Random(f"{self.seed}/{tenant}")
        chosen: list[PlannedRequest] = []
        for phase, asked in enumerate(PHASES.values()):
            at_s = phase * self.phase_s
            while asked[tenant] and at_s < (phase + 1) * self.phase_s:
                lengths = rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)
                # The prompt's words follow from the number: no prompt twice.
                number = len(WEIGHTS) * len(chosen) + tenant
                chosen.append(PlannedRequest(number, round(1e9 * at_s), *lengths))
                at_s += rng.expovariate(asked[tenant] * self.capacity)
        return chosen
