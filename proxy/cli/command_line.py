"""The commands of `balanceroute`: their parsers, and how their faults are told."""

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from balanceroute import __version__
from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.topologies import TopologyError, did_you_mean
from balanceroute.traces import TraceError

# The parser of every command: faults in one line, and a word on what may have been meant.


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


# Each is a module of `balanceroute.proxy.cli` with an `add_parser`, with _ for -; in the order of the
# help: to serve a fleet, to measure it, to try without engines, to learn.
COMMANDS = (
    "serve",
    "doctor",
    "topology",
    "drain",
    "hash-key",
    "audit",
    "advise",
    "validate",
    "up",
    "emulate",
    "replay",
    "simulate",
    "train",
    "evaluate",
    "model-router",
)


def make_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, or of some of its commands."""
    parser: argparse.ArgumentParser = Parser(
        prog="balanceroute",
        description="Barrier-aware routing for prefill-decode disaggregated LLM serving.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    choices = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        import_module(f"balanceroute.proxy.cli.{command.replace('-', '_')}").add_parser(choices)
    return parser


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for a fault of the user's input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows no ± gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    # Every matrix here is small: with threads, which numpy's library starts when it is imported, a
    # product takes longer, and far longer where the cores are busy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    words = sys.argv[1:] if arguments is None else arguments
    # Only what the command needs is imported: the proxy starts without the emulator.
    wanted = words[:1] if words and words[0] in COMMANDS else COMMANDS
    chosen = make_parser(wanted).parse_args(words, argparse.Namespace(words=tuple(words)))
    try:
        status: int = chosen.run(chosen)
    except (BalanceRouteError, TopologyError, TraceError, OSError) as error:
        print(f"balanceroute: {_words(error)}", file=sys.stderr)  # noqa: T201 - the command line's answer.
        return 2
    return status


def _words(error: Exception) -> str:
    """Return what is wrong and where; Python itself begins with the error's number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
