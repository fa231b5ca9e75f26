"""Flags that ask for figures by tenant and class."""

from dataclasses import dataclass
from math import inf

from balanceroute.proxy.lab.service_levels import Targets
from balanceroute.proxy.settings.setting import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What tenants and classes are reported; one of them or a trace of several asks for it."""

    ttft_target: float | None = number(
        None, "a good request's time to the first token, at most", 1e-3, 1e6, metavar="S"
    )
    tpot_target: float | None = number(
        None, "a good request's mean time between tokens, at most", 1e-6, 1e6, metavar="S"
    )

    def targets(self, groups: int) -> Targets | None:
        """Return the targets if figures by tenant and class are to be reported, else None.

        Args:
            groups: Tenants and classes that the trace has.
        """
        if self == Goodput() and groups < 2:
            return None
        return Targets(self.ttft_target or inf, self.tpot_target or inf)
