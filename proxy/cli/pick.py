"""`balanceroute pick`: tell a gateway where its requests go, as its endpoint picker."""

import argparse
import os

from balanceroute.proxy.cli.serve import (
    add_serving_command,
    configure_and_serve,
    flags_given,
    topology_given,
)
from balanceroute.proxy.settings import variable_of


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = add_serving_command(
        commands,
        "pick",
        help="tell a gateway where its requests go, as its endpoint picker",
        description=__doc__,
        epilog="It is `balanceroute serve` with --pick coordinator, unless that says sidecar.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    topology = topology_given(arguments)
    given = flags_given(arguments)
    said = topology is not None and "pick" in topology.proxy
    if given["pick"] is None and not said and variable_of("pick") not in os.environ:
        given["pick"] = "coordinator"
    return configure_and_serve(topology, given, arguments)
