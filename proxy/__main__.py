"""The command line: `balanceroute`, or `python -m balanceroute.proxy`."""

import argparse
import io
import sys
from collections.abc import Sequence

from balanceroute import __version__
from balanceroute.proxy.cli import (
    emulate,
    evaluate,
    replay,
    serve,
    simulate,
    topology,
    train,
    up,
    validate,
)
from balanceroute.proxy.cli.parser import Parser
from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.topologies import TopologyError
from balanceroute.traces import TraceError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser: argparse.ArgumentParser = Parser(
        prog="balanceroute",
        description="Barrier-aware routing for prefill-decode disaggregated LLM serving.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    simulate.add_parser(commands)
    replay.add_parser(commands)
    serve.add_parser(commands)
    up.add_parser(commands)
    topology.add_parser(commands)
    emulate.add_parser(commands)
    train.add_parser(commands)
    evaluate.add_parser(commands)
    validate.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for a fault of the user's input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows no ± gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    chosen = make_parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except (BalanceRouteError, TopologyError, TraceError, OSError) as error:
        print(f"balanceroute: {error}", file=sys.stderr)  # noqa: T201 - the command line's answer.
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
