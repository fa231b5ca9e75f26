"""`balanceroute topology`: check a topology, and show how each of its hosts is started."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.cli.running_engines import Seen, client_of, judge_pairs, look_at
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_facts import doubts
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.page_client import PageClient
from balanceroute.topologies import Finding, did_you_mean
from balanceroute.topologies.checks import (
    PortUse,
    check_engines,
    check_local_prefill,
    check_options,
    known_options,
)
from balanceroute.topologies.commands import Command, engine_commands, proxy_command
from balanceroute.topologies.topology import read_topology

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_url import EngineUrl
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.topologies.engines import Engines
    from balanceroute.topologies.topology import Topology


# The parser of an installed vLLM, asked whether it takes the commands of a topology.

TIMEOUT_S = 600
# Run by the other interpreter, which need not have this package; it uses no accelerator.
_ASK = """
import contextlib, io, json, sys
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

def ask(words):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        validate_parsed_serve_args(arguments)
        engine = AsyncEngineArgs.from_cli_args(arguments)
    except SystemExit:
        return [said.getvalue().strip().rpartition("error: ")[2], {}]
    except Exception as error:
        return [str(error) or repr(error), {}]
    transfer = engine.kv_transfer_config
    values = {"port": arguments.port, "kv_connector": transfer.kv_connector}
    values |= {"kv_role": transfer.kv_role, "kv_policy": transfer.kv_load_failure_policy}
    names = "data_parallel_size data_parallel_rank max_num_seqs pipeline_parallel_size nnodes node_rank"
    for name in names.split():
        values[name] = getattr(engine, name, None)  # Old versions lack some.
    return ["", values]

found = [ask(words) for words in json.load(sys.stdin)]
print(json.dumps({"version": vllm.__version__, "found": found}))
"""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parser's result for one command: the fault, "" if there is none, and some values."""

    fault: str
    values: Mapping[str, object]


def parse_with(python: str, commands: Sequence[Command]) -> tuple[str, list[Parsed]]:
    """Return the version of an interpreter's vLLM, and its parser's results for engine commands.

    Raises:
        ConfigError: The interpreter or its vLLM cannot be used.
    """
    # vLLM takes the model as the first word after `serve`.
    words = [[word for item in command.words for word in item][2:] for command in commands]
    try:
        ran = subprocess.run(  # noqa: S603 - the user names the interpreter.
            [python, "-c", _ASK],
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python: {error}") from error
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--engine-python: {python} cannot ask its vLLM: {last}")
    answer = json.loads(ran.stdout.strip().rpartition("\n")[2])
    return answer["version"], [Parsed(fault, values) for fault, values in answer["found"]]


def installed_python() -> str | None:
    """Return this interpreter if vLLM is installed beside this package, else None."""
    return sys.executable if find_spec("vllm") is not None else None


# Running engines compared with a topology and with each other: `balanceroute topology check
# --online`.
#
# Of each engine three pages are read: /version, /v1/models and /metrics. No request reaches a
# model.

_AT_ONCE = 32


def check_online(topology: "Topology", ca_file: "Path | None" = None) -> tuple[list[Finding], str]:
    """Ask all engines of a topology; return the findings, and the KV memory of the ranks in words.

    Args:
        topology: Of one group.
        ca_file: Verifies their certificates in place of the topology's file.

    Raises:
        ConfigError: Its proxy cannot be configured, or its engines are emulated.
    """
    if topology.emulation is not None:
        raise ConfigError(f"{topology.path}: --online: its engines are emulated")
    config = make_config(topology, {}, environment=os.environ)
    seen = asyncio.run(_look_at_all(config, client_of(config, ca_file)))
    return [*judge(topology, config.engines.connector, seen)], _memory(config, seen)


def judge(topology: "Topology", connector: str, seen: Sequence[Seen]) -> Iterator[Finding]:
    """Yield misfits: of an engine and the topology, or of a prefiller and a decode engine."""
    answered = []
    for one in seen:
        if one.fault:
            yield Finding("error", f"{one.role} {one.url}", one.fault)
        else:
            answered.append(one)
            yield from _judge_one(topology, connector, one)
    prefillers = [one for one in answered if one.role == "prefill"]
    decoders = [one for one in answered if one.role == "decode"]
    yield from judge_pairs(connector, prefillers, decoders)


def _judge_one(topology: "Topology", connector: str, one: Seen) -> Iterator[Finding]:
    key = f"{one.role} {one.url}"
    if topology.models and not one.models:
        yield Finding("error", key, "serves no model")
    facts = one.version, one.models, one.signs
    for doubt in doubts(Role(one.role), connector, *facts, wanted=topology.models, ranks=one.named):
        yield Finding("note" if doubt.endswith("?") else "error", key, doubt)
    engines = topology.engines
    # vllm-ascend's version is not vLLM's.
    wanted = None if engines is None or engines.device == "npu" else engines.version
    if wanted not in (None, one.version.partition("+")[0]):
        yield Finding("note", key, f"has vLLM {one.version}, the topology is for {wanted}")
    if one.ranks is not None and one.caches and len(one.caches) != one.ranks:
        reason = f"has {len(one.caches)} data-parallel ranks, the topology {one.ranks}"
        yield Finding("error", key, reason)
    longest = max((model.max_model_len or 0 for model in one.models), default=0)
    if one.kv_tokens is not None and one.kv_tokens < longest:
        reason = f"holds {one.kv_tokens:,} KV tokens, less than its max_model_len ({longest:,})"
        yield Finding("note", key, reason)


def _memory(config: "ProxyConfig", seen: Sequence[Seen]) -> str:
    sizes = [one.kv_tokens for one in seen if one.role == "decode" and one.kv_tokens is not None]
    if not sizes:
        return ""
    least, batch = min(sizes), config.scheduling.batch
    return f"; a decode rank holds {least:,} KV tokens, {least // batch:,} for each of {batch}"


async def _look_at_all(config: "ProxyConfig", client: PageClient) -> list[Seen]:
    seen: dict[tuple[str, EngineUrl], Seen] = {}
    for prefill in config.prefillers:
        seen["prefill", prefill.url] = Seen("prefill", prefill.url.base, None)
    for server in config.decoders:
        named = () if server.discover else server.rank_ids or ()
        ranks = None if server.discover else len(server.rank_ids or (0,))
        seen["decode", server.url] = Seen("decode", server.url.base, ranks, named)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def look(one: Seen) -> Seen:
        async with turns:
            return await look_at(pages, one)

    async with client as pages:
        return await asyncio.gather(*map(look, seen.values()))


_ROLES = ("prefill", "decode", "proxy")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    topology = read_topology(arguments.topology)
    if arguments.ca_file is not None and not arguments.online:
        raise ConfigError("--ca-file means nothing without --online")
    findings = tuple(check_topology(topology))
    options, refused = _check_flags(topology, arguments.engine_python)
    findings += refused
    memory = ""
    if arguments.online:
        # Here, so that a check of the file alone starts without it.

        for one in topology.deployments:
            found, note = check_online(one, arguments.ca_file)
            findings += tuple(found)
            memory += note
    for finding in findings:
        print(f"{topology.path}: {finding}")  # noqa: T201 - the command's answer.
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        return 2
    print(f"{topology.path}: {_summary(topology)}{options}{memory}")  # noqa: T201
    return 0


def _check_flags(topology: "Topology", python: str | None) -> tuple[str, tuple[Finding, ...]]:
    """Return the vLLM that judged the engines' flags, and its findings.

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
    # A fault of an address that follows from [engines] has just been found there.
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
    from balanceroute.proxy.live.request.leg_settings import Direct  # noqa: PLC0415

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
    margin_s = config.legs.lease_margin_s
    if config.lease_s is not None and config.lease_s < 2 * margin_s:
        reason = (
            f"is {config.lease_s:g}: less lease_margin_s ({margin_s:g}), within which no transfer "
            f"starts, a KV cache may wait {config.lease_s - margin_s:g} s only"
        )
        yield Finding("note", "proxy.lease_s", reason)
    role = engines.prefill
    if config.scheduler.probe_limit is not None and config.scheduler.probe_limit > (
        role.max_num_seqs * (role.data_parallel if role.dp_mode == "internal" else 1)
    ):
        reason = f"is {config.scheduler.probe_limit}, more than a prefiller's max_num_seqs"
        yield Finding("note", "proxy.probe_limit", reason)
    if config.legs.direct is Direct.DECODE:
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
