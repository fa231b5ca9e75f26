"""Ranges of the numbers that flags take."""

import argparse
from collections.abc import Mapping

from balanceroute.proxy.core.errors import ConfigError


def check_numbers(arguments: argparse.Namespace, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Check the range of each number that is given.

    Raises:
        ConfigError: One is out of range.
    """
    for flag, (least, most) in bounds.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag} is {value}, must be from {least:g} to {most:g}")
