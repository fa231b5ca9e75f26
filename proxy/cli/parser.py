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
        self._refuse_unknown(sys.argv[1:] if args is None else args)
        chosen, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return chosen, left

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse a flag that does not exist before one that is missing: it may be that one, misspelt."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words:
            # Behind the name of a command its own parser judges.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            flag = word.partition("=")[0]
            # No value of another flag begins so: argparse takes every such word for a flag.
            if flag.startswith("--") and flag not in flags:
                self.error(f"unrecognized arguments: {word}{self._hint(flag, flags)}")

    def _hint(self, flag: str, flags: list[str]) -> str:
        for action in self._get_positional_actions():
            if action.dest == flag.removeprefix("--").replace("-", "_"):
                return f"; write {action.metavar or action.dest} alone"
        return did_you_mean(flag, flags)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice that may have been meant, in place of all of them."""
        if action.choices is not None and value not in action.choices:
            meant = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; `--help` has the rest."""
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)
