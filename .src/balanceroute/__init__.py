"""A prefill-decode proxy that balances decode ranks, and the simulator of its scheduling."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.lab.sim.experiment import simulate as simulate

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # On demand: an engine that only loads `engine_patch` does not need the simulator's libraries.
    if name == "simulate":
        from balanceroute.proxy.lab.sim.experiment import simulate  # noqa: PLC0415

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
