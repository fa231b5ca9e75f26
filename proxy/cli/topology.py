"""`balanceroute topology`: check a topology, and show how each of its hosts is started."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.engine_parser import installed_python, parse_with
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.topologies import (
    Command,
    Finding,
    PortUse,
    check_engines,
    check_local_prefill,
    check_options,
    did_you_mean,
    engine_commands,
    known_options,
    proxy_command,
    read_topology,
)

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.topologies import Engines, Topology

_ROLES = ("prefill", "decode", "proxy")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "topology",
        help="check a topology, or show the commands of its hosts",
        description=__doc__,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="say what is wrong, and where; status 2 if anything cannot work",
        description="Say what is wrong with a topology, and where. Without --online no connection is "
        "opened.",
    )
    check.set_defaults(run=run_check)
    check.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="an interpreter with vLLM, whose parser judges the engines' flags (default: this one if "
        "it has vLLM, else the list of the options of a version)",
    )
    check.add_argument(
        "--online",
        action="store_true",
        help="also compare the running engines: their /version, /v1/models and /metrics",
    )
    check.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="with --online: verifies the certificates of https:// engines (default: the topology's "
        "engine_ca_file)",
    )
    show = actions.add_parser(
        "commands",
        help="show each process's command and environment",
        description="Show the command of each process, with its environment, quoted for a shell.",
    )
    show.set_defaults(run=run_commands)
    for action in (check, show):
        action.add_argument(
            "topology", metavar="TOPOLOGY", help="a TOML file, or the name of a shipped one"
        )
    show.add_argument("--host", metavar="HOST", help="only those of one host (default: all)")
    show.add_argument("--role", choices=_ROLES, help="only those of one role (default: all)")
    show.add_argument(
        "--lines",
        action="store_true",
        help="a name, a tab and the command on one line, for scripts",
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Run `topology check`; return 2 if anything cannot work.

    Raises:
        ConfigError: A flag means nothing, or the engines cannot be asked.
        TopologyError: The file is no topology.
    """
    topology = read_topology(arguments.topology)
    if arguments.ca_file is not None and not arguments.online:
        raise ConfigError("--ca-file means nothing without --online")
    findings = tuple(check_topology(topology))
    options, refused = _check_flags(topology, arguments.engine_python)
    findings += refused
    memory = ""
    if arguments.online:
        # Here, so that a check of the file alone starts without it.
        from balanceroute.proxy.cli.online_check import check_online  # noqa: PLC0415

        for one in topology.deployments:
            found, told = check_online(one, arguments.ca_file)
            findings += tuple(found)
            memory += told
    for finding in findings:
        print(f"{topology.path}: {finding}")  # noqa: T201 - the command's answer.
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        return 2
    print(f"{topology.path}: {_summary(topology)}{options}{memory}")  # noqa: T201
    return 0


def _check_flags(topology: "Topology", python: str | None) -> tuple[str, tuple[Finding, ...]]:
    """Return what judged the engines' flags, and its findings.

    Raises:
        ConfigError: The interpreter cannot be used.
    """
    engines = topology.engines
    if engines is None:
        return "", ()
    python = python or installed_python()
    options, theirs = known_options(engines)
    findings = tuple(check_options(engines))
    if python is None:
        which = "" if theirs else " (another version than theirs)"
        return f"; flags by the list of {options.engine}{which}", findings
    # The environment and vllm-ascend's own keys are no matter of the parser.
    findings = tuple(found for found in findings if found.level == "note")
    sys.stderr.write(f"asking the parser of {python}\n")
    commands = engine_commands(engines, topology.models)
    version, parsed = parse_with(python, commands)
    refused = dict[str, Finding]()
    for command, one in zip(commands, parsed, strict=True):
        if one.fault:
            refused.setdefault(one.fault, Finding("error", command.name, one.fault))
    if engines.version is not None and engines.device != "npu" and version != engines.version:
        reason = f"is {engines.version}, but {python} has vLLM {version}"
        findings += (Finding("note", "engines.version", reason),)
    return f"; flags by the parser of vLLM {version}", (*findings, *refused.values())


def run_commands(arguments: argparse.Namespace) -> int:
    """Run `topology commands`.

    Raises:
        ConfigError: The topology does not say how its engines are started, or has no such host.
        TopologyError: The file is no topology.
    """
    topology = read_topology(arguments.topology)
    commands = commands_of(topology, arguments.topology)
    hosts = {command.host for command in commands}
    if arguments.host is not None and arguments.host not in hosts:
        hint = did_you_mean(arguments.host, sorted(hosts))
        raise ConfigError(f"--host: {topology.path} has no host {arguments.host!r}{hint}")
    chosen = [
        command
        for command in commands
        if arguments.host in (None, command.host) and arguments.role in (None, command.role)
    ]
    if arguments.lines:
        text = "\n".join(f"{command.name}\t{command.one_line()}" for command in chosen)
    else:
        text = "\n\n".join(command.shell() for command in chosen)
    if text:
        print(text)  # noqa: T201
    return 0


def commands_of(topology: "Topology", word: str) -> tuple[Command, ...]:
    """Return the commands of all processes.

    Raises:
        ConfigError: It does not say how its engines are started.
    """
    engines = topology.engines
    if engines is None:
        if topology.emulation is not None:
            reason = f"its engines are emulated: `balanceroute up {word}` starts them"
        else:
            reason = "has no [engines] table, which says how its engines are started"
        raise ConfigError(f"{topology.path}: {reason}")
    return (*engine_commands(engines, topology.models), proxy_command(engines, word))


def check_topology(topology: "Topology") -> Iterator[Finding]:
    """Yield all that is wrong with a topology that could be read."""
    # Here, so that the other subcommands start without them.
    from balanceroute.proxy.live.settings.configure import make_config  # noqa: PLC0415

    if topology.emulation is not None:
        yield from _check_emulation(topology)
        return
    engines = topology.engines
    config, refused = None, ""
    try:
        config = make_config(topology, {})
    except ConfigError as error:
        refused = str(error).removeprefix(f"{topology.path}: ")
    findings: tuple[Finding, ...] = ()
    if engines is not None:
        findings = check_engines(engines, () if config is None else _proxy_ports(engines, config))
    # What is wrong with an address that follows from [engines] has just been found there.
    if refused and not (findings and refused.startswith(("prefill[", "decode["))):
        yield Finding("error", "", refused)
    yield from findings
    if engines is not None and config is not None:
        yield from _check_proxy(engines, config)


def _check_emulation(topology: "Topology") -> Iterator[Finding]:
    from balanceroute.proxy.cli.up import emulate_command  # noqa: PLC0415

    try:
        emulate_command(topology)
    except ConfigError as error:
        yield Finding("error", "", str(error).removeprefix(f"{topology.path}: "))


def _proxy_ports(engines: "Engines", config: "ProxyConfig") -> Iterator[PortUse]:
    listening, host = config.listening, engines.proxy_host
    if listening.port:
        ports = range(listening.port, listening.port + 1)
        yield PortUse(host, ports, "proxy.port", "the proxy")
    if listening.admin and listening.admin_port:
        ports = range(listening.admin_port, listening.admin_port + 1)
        yield PortUse(host, ports, "proxy.admin_port", "the proxy's administration")


def _check_proxy(engines: "Engines", config: "ProxyConfig") -> Iterator[Finding]:
    """Yield where the proxy and the engines do not agree."""
    from balanceroute.proxy.live.request.direct import Direct  # noqa: PLC0415

    batch, slots = config.scheduling.batch, engines.decode.max_num_seqs
    if batch > slots:
        reason = (
            f"is {batch}, more than a decode rank's max_num_seqs ({slots}): the rest would wait in "
            "the engine, where nothing can choose among them"
        )
        yield Finding("error", "proxy.batch", reason)
    elif batch < slots:
        reason = f"is {batch}: {slots - batch} of a decode rank's max_num_seqs ({slots}) stay empty"
        yield Finding("note", "proxy.batch", reason)
    lease_s = engines.lease_s
    if lease_s is not None and (config.lease_s is None or config.lease_s > lease_s):
        given = "inf" if config.lease_s is None else f"{config.lease_s:g}"
        reason = f"is {given}, but prefillers free KV caches after {lease_s} s ([engines].lease_s)"
        yield Finding("error", "proxy.lease_s", reason)
    margin_s = config.scheduling.lease_margin_s
    if config.lease_s is not None and config.lease_s < 2 * margin_s:
        reason = (
            f"is {config.lease_s:g}: less lease_margin_s ({margin_s:g}), within which no transfer "
            f"starts, a KV cache may wait {config.lease_s - margin_s:g} s only"
        )
        yield Finding("note", "proxy.lease_s", reason)
    role = engines.prefill
    if config.scheduling.probe_limit is not None and config.scheduling.probe_limit > (
        role.max_num_seqs * (role.data_parallel if role.dp_mode == "internal" else 1)
    ):
        reason = f"is {config.scheduling.probe_limit}, more than a prefiller's max_num_seqs"
        yield Finding("note", "proxy.probe_limit", reason)
    if config.direct is Direct.DECODE:
        yield from check_local_prefill(engines)
    if config.listening.host in _LOOPBACK and engines.proxy_host not in _LOOPBACK:
        reason = f"is {config.listening.host}: only {engines.proxy_host} itself reaches the proxy"
        yield Finding("note", "proxy.host", reason)


def _summary(topology: "Topology") -> str:
    engines = topology.engines
    if topology.groups:
        names = ", ".join(group.name for group in topology.groups)
        return f"nothing is wrong with it: {_count(len(topology.groups), 'group')}: {names}"
    if engines is None:
        return "nothing is wrong with it"
    prefillers = len(topology.prefill)
    ranks = sum(len(entry.rank_ids or (0,)) for entry in topology.decode)
    hosts = {host for role in engines.roles for host in role.hosts}
    return (
        f"nothing is wrong with it: {_count(prefillers, 'prefiller')} and "
        f"{_count(ranks, 'decode rank')} on {_count(len(hosts), 'host')}, {engines.connector}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
