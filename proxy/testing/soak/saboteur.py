"""Lets the faults of a plan happen to engines that are processes, and undoes them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from balanceroute.proxy.testing.chaos.faults import Act, Injection
from balanceroute.proxy.testing.soak.control import Control, ControlError
from balanceroute.proxy.testing.soak.load import Load
from balanceroute.proxy.testing.soak.plan import is_deadly


class Saboteur:
    """Gives the orders of one plan."""

    def __init__(
        self,
        engines: Control,
        admin: Control,
        urls: Mapping[str, str],
        injections: Sequence[Injection],
    ) -> None:
        self._engines = engines
        self._admin = admin
        self._urls = urls
        self._injections = injections

    async def work(self, load: Load) -> None:
        """Do everything while a load runs, and undo it."""
        begins = [(one.start_s, number, True) for number, one in enumerate(self._injections)]
        ends = [(one.end_s, number, False) for number, one in enumerate(self._injections)]
        for at_s, number, begin in sorted([*begins, *ends]):
            await load.reached(at_s)
            await (self._begin if begin else self._end)(self._injections[number])
        await self._engines.post("/emulation/faults/clear", {})

    async def _begin(self, injection: Injection) -> None:
        engine = _engine(injection)
        if injection.act is Act.BOARD:
            await self._engines.post("/emulation/faults", {"engine": engine, **injection.changes})
        elif injection.act is Act.KILL:
            await self._engines.post("/emulation/kill", {"engine": engine})
        else:
            await self._admin.post("/admin/instances/drain", self._order(injection))

    async def _end(self, injection: Injection) -> None:
        engine = _engine(injection)
        if injection.act is Act.BOARD:
            await self._engines.post("/emulation/faults", {"engine": engine, **injection.usual})
        if is_deadly(injection):
            await self._engines.post("/emulation/restore", {"engine": engine})
        if injection.act is Act.DRAIN:
            # Unless another fault of this kind has ended already.
            with suppress(ControlError):
                await self._admin.post("/admin/instances", self._order(injection))

    def _order(self, injection: Injection) -> dict[str, object]:
        return {"role": injection.role.value, "url": self._urls[_engine(injection)]}


def _engine(injection: Injection) -> str:
    return f"{injection.role.value}/{injection.engine}"
