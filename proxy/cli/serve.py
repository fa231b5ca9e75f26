"""`balanceroute serve`: route OpenAI-compatible requests to prefill and decode engines."""

import argparse
import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.setting import flag_of
from balanceroute.proxy.live.settings.declared import HEADINGS, SECTIONS
from balanceroute.proxy.settings import add_flags, given_by_flags, variable_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.topologies.topology import Topology


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = add_serving_command(
        commands,
        "serve",
        help="route requests to prefill and decode engines",
        description=__doc__,
        epilog="Times are in seconds. A topology names the engines, the connector and the models; "
        "every other flag can stand in its [proxy] table, with underscores. A flag overrides the "
        "file.",
    )
    parser.set_defaults(run=run)


def add_serving_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, **words: Any
) -> argparse.ArgumentParser:
    """Add a command that serves engines that run; return its parser, with the flags of all settings."""
    usage = """%(prog)s --prefill URL [URL ...] --decode URL [URL ...] [option ...]
       %(prog)s --discover SOURCE [SOURCE ...] [option ...]
       %(prog)s --topology FILE [option ...]"""
    parser = commands.add_parser(name, usage=usage, **words)
    named = "the engines and settings as a TOML file, or the name of a shipped one"
    parser.add_argument("--topology", metavar="FILE", help=named)
    add_serve_flags(parser)
    return parser


def topology_given(arguments: argparse.Namespace) -> "Topology | None":
    """Return the topology that a flag or a variable names, if one does. Raises TopologyError, OSError."""
    named = arguments.topology or os.environ.get(variable_of("topology"))
    if not named:
        return None
    from balanceroute.topologies.topology import read_topology  # noqa: PLC0415

    return read_topology(named)


def add_serve_flags(parser: argparse.ArgumentParser, *, without: "Collection[str]" = ()) -> None:
    """Add the flag of every setting but those named."""
    for heading, sections in HEADINGS.items():
        add_flags(parser.add_argument_group(heading), *sections, without=without)


def flags_given(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the values of the settings' flags by name; None for those that were not given."""
    return given_by_flags(arguments, SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    return configure_and_serve(topology_given(arguments), flags_given(arguments), arguments)


def _ask_engines(config: "ProxyConfig") -> dict[str, object]:
    """Return what is not given of the connector and the batch limit, as the engines report it.

    Raises:
        ConfigError: They contradict each other.
    """
    if {"connector", "batch"} <= config.given.keys() or not (config.prefillers and config.decoders):
        return {}
    # Here, so that a command that names both starts without it.
    from balanceroute.proxy.cli.running_engines import reported_settings  # noqa: PLC0415

    reported = asyncio.run(reported_settings(config))
    if reported and sys.stdout.isatty():  # The log has it too.
        words = " ".join(f"{flag_of(name)} {value}" for name, value in reported.items())
        sys.stdout.write(f"the engines tell: {words}\n")
    return reported


def configure_and_serve(
    topology: "Topology | None",
    given: "Mapping[str, object]",
    arguments: argparse.Namespace,
    *,
    owns_engines: bool = False,
) -> int:
    """Serve until a signal ends it; return the exit status.

    Args:
        arguments: Of the command; a new version is started by the same words.
        owns_engines: Whether this command has started the engines.

    Raises:
        ConfigError: A setting cannot be served.
        OSError: A file cannot be read, or an address cannot be bound.
    """
    # Here, so that the other subcommands start without them.
    from balanceroute.proxy.live.serve import ServeCommand, serve  # noqa: PLC0415
    from balanceroute.proxy.live.settings.configure import (  # noqa: PLC0415
        make_config,
        make_group,
        read_credentials,
    )

    config = make_config(topology, given, environment=os.environ)
    reported = {} if owns_engines else _ask_engines(config)
    if reported:
        config = make_config(topology, {**given, **reported}, environment=os.environ)
    renew = partial(read_credentials, topology, given, environment=os.environ)
    added = None
    if topology is not None and topology.groups:
        added = partial(make_group, topology, given, environment=os.environ)
    return serve(config, ServeCommand(arguments.words, owns_engines, renew, added, reported))
