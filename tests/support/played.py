"""Tests that are scenarios: coroutine functions, which a player gives a place to play in."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from inspect import Signature, signature
from typing import Any

from tests.support.virtual.runner import run

PATIENCE_S = 60.0

Maker = Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]


def played_by(player: Callable[..., None], *, places: int = 1) -> Callable[..., Maker]:
    """Return a decorator that makes a test of a scenario.

    The decorator takes the player's settings. One that is a function is given those parameters of the
    test that it names. The name of a parameter alone makes it a setting, and `**name` all that are in it.

    Args:
        player: Plays a function, which it gives so many `places`.
        places: The scenario's first parameters; the rest are the test's.
    """

    def decorator(*names: str, **settings: Any) -> Maker:
        def make(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
            asked = Signature([*signature(scenario).parameters.values()][places:])

            @wraps(scenario)
            def test(*args: Any, **named: Any) -> None:
                given = asked.bind(*args, **named).arguments
                found = {
                    name: value(*(given[one] for one in signature(value).parameters))
                    if callable(value)
                    else value
                    for name, value in settings.items()
                }
                for name in names:
                    found |= given[name[2:]] if name.startswith("**") else {name: given[name]}
                player(partial(scenario, **given), **found)

            test.__signature__ = asked  # type: ignore[attr-defined]
            return test

        return make

    return decorator


def play_in_real_time(
    main: Callable[[], Awaitable[None]], *, patience_s: float = PATIENCE_S
) -> None:
    """Run a coroutine function on asyncio's own loop, for so many seconds at most."""

    async def guarded() -> None:
        async with asyncio.timeout(patience_s):
            await main()

    asyncio.run(guarded())


in_real_time = played_by(play_in_real_time, places=0)
# Given the loop; the settings are those of `run`.
in_virtual_time = played_by(partial(run, seed=1))
