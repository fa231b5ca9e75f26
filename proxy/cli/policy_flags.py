"""Flags made of settings, and those of the policies, which several subcommands share.

A flag that is not given stays None, so that what a file says can stand in for it. Values are
checked with those of the file, not while the command line is parsed.
"""

import argparse
from typing import TYPE_CHECKING

from balanceroute.proxy.live.settings.flags import POLICY_KNOBS, policy_settings
from balanceroute.proxy.live.settings.options import Values

if TYPE_CHECKING:
    from balanceroute.proxy.core.policies import PolicySettings
    from balanceroute.proxy.live.settings.options import Option


def add_flag(group: "argparse._ArgumentGroup", option: "Option[object]") -> None:
    """Add a setting's flag."""
    default = f" (default: {option.shown_default})" if option.shown_default else ""
    text = f"{option.help}{default}".replace("%", "%%")
    if option.metavar is None:
        switch = argparse.BooleanOptionalAction
        group.add_argument(option.flag, action=switch, default=None, help=text)
    elif option.many:
        group.add_argument(
            option.flag, nargs="+", action="extend", metavar=option.metavar, help=text
        )
    else:
        group.add_argument(
            option.flag,
            type=option.parse,
            choices=option.choices or None,
            metavar=option.metavar if not option.choices else None,
            help=text,
        )


def add_policy_flags(group: "argparse._ArgumentGroup") -> None:
    """Add the flags of the policies' knobs."""
    for option in POLICY_KNOBS:
        add_flag(group, option)


def settings_from_flags(arguments: argparse.Namespace) -> "PolicySettings":
    """Return the policies' knobs.

    Raises:
        ConfigError: One has a value that it cannot have.
    """
    given = {option.name: getattr(arguments, option.name) for option in POLICY_KNOBS}
    return policy_settings(Values(POLICY_KNOBS, flags=given))
