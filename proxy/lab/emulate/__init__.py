"""Emulated engines: HTTP servers that speak the PD protocol, with one barrier for all ranks."""

from balanceroute.proxy.lab.emulate.faults import Faults
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings, Frontend, Preemption

__all__ = ["DpMode", "EmulatedFleet", "EmulationSettings", "Faults", "Frontend", "Preemption"]
