"""Policies from outside this package, named `module:function`.

The function takes `PolicyInputs` and returns a `Policy`. What such a policy decides is checked like
any other's, see `decision`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies.base import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

_MEMBERS = ("slots_beyond_batch", "projection", "next_decision_ns", "dispatch")


def is_outside(name: str) -> bool:
    """Return whether a name is one of these, `module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), function]))


def outside_policy(name: str) -> "Callable[[Any], Policy]":
    """Import what makes a policy of `PolicyInputs`; modules of the working directory come last.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # A console script does not look there.
    try:
        made: Any = getattr(import_module(module_name), function_name)
    # Any exception: the module is third-party code.
    except Exception as error:
        raise ConfigError(f"policy {name!r} cannot be imported: {error}") from error

    def make(inputs: Any) -> Policy:
        try:
            policy: Policy = made(inputs)
        except Exception as error:
            raise ConfigError(f"policy {name!r} cannot be made: {error}") from error
        missing = [member for member in _MEMBERS if not hasattr(policy, member)]
        if missing:
            raise ConfigError(f"policy {name!r} is none: {policy!r} has no {', '.join(missing)}")
        return policy

    return make
