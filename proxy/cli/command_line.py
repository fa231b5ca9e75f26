"""The commands of `balanceroute`: their parsers, and how their faults are told."""

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from balanceroute import __version__
from balanceroute.proxy.cli.parser import Parser
from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.topologies import TopologyError
from balanceroute.traces import TraceError

# Each is a module of `balanceroute.proxy.cli` with an `add_parser`, with _ for -; in the order of the
# help: to serve a fleet, to measure it, to try without engines, to learn.
COMMANDS = (
    "serve",
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
