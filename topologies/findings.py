"""One finding of `balanceroute topology check`."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a topology.

    Attributes:
        level: "error" if it cannot work, "note" if it may be intended.
        key: The key in question, as in `engines.prefill.port`; "" if the reason has it.
        reason: The problem.
    """

    level: Level
    key: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.level, self.key, self.reason) if part)
