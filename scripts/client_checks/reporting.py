"""How a client's checks are run and reported: the library's version, then a line of JSON for each check.

The scripts beside this one run in environments of their own, without this project's package.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

FOUND_FAULTS = 3
# Of a forced tool's arguments: what a grammar makes of random weights has to end by itself.
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


def report(version: str, checks: object, *left_out: str) -> int:
    """Print the name of each check and what went wrong, or null; return `FOUND_FAULTS` if anything did."""
    print(version, flush=True)
    failures = 0
    for name, fault in outcomes(checks, *left_out):
        failures += fault is not None
        print(json.dumps([name, fault]), flush=True)
    return FOUND_FAULTS if failures else 0


def outcomes(checks: object, *left_out: str) -> Iterator[tuple[str, str | None]]:
    """Run every public method of `checks`, in order; yield what its name claims, and what is wrong.

    Those whose names begin with one of `left_out` are left out.
    """
    for name in vars(type(checks)):
        if name.startswith(("_", *left_out)):
            continue
        fault = None
        try:
            ending = getattr(checks, name)()
            if ending is not None:
                asyncio.run(ending)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        yield name.replace("_", " "), fault


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the exception of that kind which a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it was taken")
