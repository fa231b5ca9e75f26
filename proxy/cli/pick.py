"""`balanceroute pick`: tell a gateway where its requests go, as its endpoint picker."""

import argparse
import os
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.serve import add_serve_flags, configure_and_serve, flags_given
from balanceroute.proxy.settings import variable_of
from balanceroute.topologies import read_topology

if TYPE_CHECKING:
    from balanceroute.topologies import Topology


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "pick",
        help="tell a gateway where its requests go, as its endpoint picker",
        usage="%(prog)s --prefill URL [URL ...] --decode URL [URL ...] [option ...]\n"
        "       %(prog)s --discover SOURCE [SOURCE ...] [option ...]\n"
        "       %(prog)s --topology FILE [option ...]",
        description=__doc__,
        epilog="It is `balanceroute serve` with --pick coordinator, unless that says sidecar.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="the engines and settings as a TOML file, or the name of a shipped one",
    )
    add_serve_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command: serve until a signal ends it.

    Raises:
        ConfigError: A setting cannot be served.
        TopologyError: The topology cannot be used.
        OSError: A file cannot be read, or an address cannot be bound.
    """
    topology: Topology | None = None
    named = arguments.topology or os.environ.get(variable_of("topology"))
    if named:
        topology = read_topology(named)
    given = flags_given(arguments)
    said = topology is not None and "pick" in topology.proxy
    if given["pick"] is None and not said and variable_of("pick") not in os.environ:
        given["pick"] = "coordinator"
    return configure_and_serve(topology, given, arguments)
