"""The faults of each engine."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.faults import Faults

_LOG = logging.getLogger(__name__)


class FaultBoard:
    """Switches faults of engines on and off.

    An engine is chosen by its name ("decode/3"), by its place in the fleet, by its role ("prefill" or
    "decode", for all of them), or as one of "all".
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self, engine: str | int, **changes: Any) -> list[str]:
        """Change some faults of some engines; return the engines' names.

        Raises:
            ConfigError: There is no such engine or fault, or the value is invalid.
        """
        chosen = self._chosen(engine)
        for target, faults in [(target, target.faults.changed(changes)) for target in chosen]:
            before, target.faults = target.faults, faults
            self._apply(target, before)
        return [target.name for target in chosen]

    def clear(self, engine: str | int = "all") -> list[str]:
        """Switch all faults of some engines off; return the engines' names.

        Raises:
            ConfigError: There is no such engine.
        """
        chosen = self._chosen(engine)
        for target in chosen:
            before, target.faults = target.faults, Faults()
            self._apply(target, before)
        return [target.name for target in chosen]

    def active(self) -> Mapping[str, Faults]:
        """Return the faults of the engines that have any, by name."""
        return {target.name: target.faults for target in self._engines if target.faults != Faults()}

    def _chosen(self, engine: str | int) -> list[Engine]:
        chosen = [
            target
            for number, target in enumerate(self._engines)
            if engine in ("all", target.name, target.name.partition("/")[0])
            or (type(engine) is int and engine == number)
        ]
        if not chosen:
            raise ConfigError(f"engine {engine!r} is unknown")
        return chosen

    def _apply(self, engine: Engine, before: Faults) -> None:
        if engine.faults.stopping and not before.stopping:
            engine.abort()
        if engine.faults.frozen is not before.frozen:
            engine.freeze()
        if engine.faults.refuse and not before.refuse:
            engine.refuse()
        elif before.refuse and not engine.faults.refuse:
            task = asyncio.get_running_loop().create_task(self._listen(engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _listen(engine: Engine) -> None:
        if not engine.alive:
            return  # A killed one listens when it is restarted.
        try:
            await engine.listen(engine.port)
        except OSError as error:
            _LOG.warning("%s cannot listen again: %s", engine.name, error)
