"""The parser of every command: faults in one line, and a word on what may have been meant."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from balanceroute.topologies import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations: a new flag must not change what an old line means."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | options)

    def parse_known_args(  # type: ignore[override]  # The base class has overloads for it.
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; what is left over is this command's fault, not that of the one above it."""
        chosen, left = super().parse_known_args(args, namespace)
        if left:
            flag = left[0].partition("=")[0]
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            meant = did_you_mean(flag, flags) if flag.startswith("--") else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        return chosen, left

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; `--help` has the rest."""
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)
