"""Clients as people use them, before real engines: the checks of `check_clients.py` that need no emulation."""

import sys
from pathlib import Path

from fleet import Fleet

sys.path.insert(0, str(Path(__file__).parents[1] / "client_checks"))

from kits import Result, check_frameworks, check_schema

_MODEL = "tiny"
_EXAMPLES = 25


class ClientChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check_client_libraries(self) -> str:
        with self._fleet.proxy("libraries") as proxy:
            # A model of random weights calls no tool that a library could parse.
            return _judge(list(check_frameworks(proxy.url, _MODEL, "tool", "structured")))

    def check_statuses_are_one_engines_for_requests_of_its_own_schema(self) -> str:
        engine = self._fleet.prefillers[0].url
        with self._fleet.proxy("schema") as proxy:
            return _judge(list(check_schema(proxy.url, _MODEL, engine, _EXAMPLES)))


def _judge(results: list[Result]) -> str:
    faults = [f"{one.client}, {one.check}: {one.fault}" for one in results if one.fault]
    assert not faults, f"{len(faults)} of {len(results)}: " + "; ".join(faults)[:3000]
    return f"{len(results)} checks"
