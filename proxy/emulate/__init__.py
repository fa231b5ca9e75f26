"""Emulated engines: HTTP servers that speak the PD protocol, with one barrier for all ranks."""

from balanceroute.proxy.emulate.faults import Faults
from balanceroute.proxy.emulate.fleet import EmulatedFleet
from balanceroute.proxy.emulate.settings import Connector, DpMode, EmulationSettings, Preemption

__all__ = ["Connector", "DpMode", "EmulatedFleet", "EmulationSettings", "Faults", "Preemption"]
