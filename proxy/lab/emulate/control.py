"""The `/emulation` endpoints, on every engine's server: measurements, faults and lengths at run time.

GET  /emulation/stats
GET  /emulation/stats/picture
POST /emulation/stats/reset
GET  /emulation/faults
POST /emulation/faults         {"engine": "decode/3", "hang": true}
POST /emulation/faults/clear   {"engine": "all"}
POST /emulation/lengths        {"replay-1-0": 120, "replay-1-1": 7}
POST /emulation/kill           {"engine": "prefill/0"}
POST /emulation/restore        {"engine": "prefill/0"}
"""

import asyncio
import json
import logging
from dataclasses import asdict
from enum import Enum
from typing import Any, Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.fault_board import FaultBoard
from balanceroute.proxy.lab.emulate.lengths import Lengths

_LOG = logging.getLogger(__name__)


class Fleet(Protocol):
    """What the endpoints use of the fleet; see `EmulatedFleet`."""

    faults: FaultBoard

    @property
    def lengths(self) -> Lengths:
        """Lengths of the answers to named requests."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the measurements."""
        ...

    def picture(self) -> list[list[int]]:
        """Return the loads of the first steps."""
        ...

    def reset_stats(self) -> None:
        """Reset all measurements."""
        ...

    def engine(self, name: object) -> Engine:
        """Return an engine."""
        ...

    async def restore(self, engine: str | int) -> None:
        """Restart a killed engine."""
        ...


class FleetControl:
    """Answers requests under `/emulation`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, method: bytes, name: str, body: bytes) -> tuple[int, object]:
        """Return status and JSON of a request."""
        try:
            return 200, self._do(method.decode("latin-1"), name, body)
        except ConfigError as error:
            return 400, {"error": str(error)}

    def _do(self, method: str, name: str, body: bytes) -> object:
        fleet = self._fleet
        match method, name:
            case "GET", "stats":
                return fleet.stats()
            case "GET", "stats/picture":
                return fleet.picture()
            case "POST", "stats/reset":
                fleet.reset_stats()
                return {}
            case "GET", "faults":
                return {
                    engine: _plain(asdict(faults))
                    for engine, faults in fleet.faults.active().items()
                }
            case "POST", "faults":
                values = _values(body)
                return {"engines": fleet.faults.set(values.pop("engine", "all"), **values)}
            case "POST", "faults/clear":
                return {"engines": fleet.faults.clear(_values(body).get("engine", "all"))}
            case "POST", "lengths":
                return {"lengths": fleet.lengths.add(_values(body))}
            case "POST", "kill":
                # Not at once: this engine may have to send the answer first.
                engine = fleet.engine(_values(body).get("engine"))
                asyncio.get_running_loop().call_soon(engine.kill)
                return {"engines": [engine.name]}
            case "POST", "restore":
                engine = fleet.engine(_values(body).get("engine"))
                task = asyncio.get_running_loop().create_task(self._restore(engine.name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return {"engines": [engine.name]}
            case _:
                raise ConfigError(f"{method} /emulation/{name} is unknown")

    async def _restore(self, engine: str) -> None:
        try:
            await self._fleet.restore(engine)
        except OSError as error:
            _LOG.warning("%s cannot be started again: %s", engine, error)


def _values(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body or b"{}")
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("the body is not a JSON object")
    return values


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }
