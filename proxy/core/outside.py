"""Parts from outside this package: `module:function`, or what an installed package calls so.

A package names its parts in its own metadata, as entry points of the groups `balanceroute.policies` and
`balanceroute.predictors`.
"""

import sys
from importlib import import_module
from typing import Any

from balanceroute.proxy.core.errors import ConfigError


def is_outside(name: str) -> bool:
    """Return whether a name is one of these, `module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), function]))


def outside_name(kind: str, name: str) -> str | None:
    """Return the `module:function` of a part that is none of this package's; None if there is none.

    Args:
        kind: "policies" or "predictors".
        name: That itself, or the name of an entry point.
    """
    if is_outside(name):
        return name
    # Here: it would bring sockets and more into the core.
    from importlib.metadata import entry_points  # noqa: PLC0415

    found = (one.value for one in entry_points(group=f"balanceroute.{kind}", name=name))
    return next(found, None)


def imported(what: str, name: str) -> Any:
    """Import a function; modules of the working directory come last.

    Args:
        what: What it makes, for messages.
        name: `module:function`.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # A console script does not look there.
    try:
        return getattr(import_module(module_name), function_name)
    # Any exception: the module is third-party code.
    except Exception as error:
        raise ConfigError(f"{what} {name!r} cannot be imported: {error}") from error


def made(what: str, name: str, members: tuple[str, ...], *arguments: object) -> Any:
    """Return what such a function makes.

    Raises:
        ConfigError: It cannot be imported, fails, or makes something without these members.
    """
    function = imported(what, name)
    try:
        part = function(*arguments)
    except Exception as error:
        raise ConfigError(f"{what} {name!r} cannot be made: {error}") from error
    missing = [member for member in members if not hasattr(part, member)]
    if missing:
        raise ConfigError(f"{what} {name!r} is none: {part!r} has no {', '.join(missing)}")
    return part
