"""How a client's checks are run and reported: the library's version, then a line of JSON for each check.

The scripts beside this one run in environments of their own, without this project's package.
"""

import asyncio
import json
from collections.abc import Callable
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
    """Run every public method of `checks`, in order; the name of a method is what it claims.

    Those whose names begin with one of `left_out` are left out.

    Prints the name of each and what went wrong, or null. Returns `FOUND_FAULTS` if anything did.
    """
    print(version, flush=True)
    failures = 0
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
            failures += 1
        print(json.dumps([name.replace("_", " "), fault]), flush=True)
    return FOUND_FAULTS if failures else 0


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the exception of that kind which a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it was taken")
