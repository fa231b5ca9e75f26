"""Two tenants of weights 2 and 1, live before emulated engines: shares, refusals and recovery.

    python scripts/qos.py [--out build/qos] [--phase-s S] [--step-ms MS] [--target-s S]

Starts emulated engines and the proxy (`--tenants`, `--fair-queue kv-token-seconds`, `--aimd`), and
sends each tenant's requests in open loop, drawn from a seed, through four phases. Prints what each
tenant got in each phase, and writes `qos.json` and `qos.png`. Exits 1 if the shares are not the
weights' in the first phase, if the tenant that stays in the second does not get everything, or if a
request is lost: neither answered as a whole, nor refused with 429 or 503 and a Retry-After.
"""

import argparse
import asyncio
import hashlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import httpx
import uvloop

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.pictures import write_pictures
from balanceroute.proxy.lab.replay.driver import replay
from balanceroute.proxy.lab.replay.requests import ReplaySettings
from balanceroute.proxy.testing.soak.proxy_process import ProxyProcess, running_proxy

sys.path.insert(0, str(Path(__file__).parent / "qos_report"))

from phases import BATCH, PHASES, RANKS, SETTLING, WEIGHTS, Setup
from picture import draw
from rows import Held, Run, failures, kv_held, row_of, table

PREFILLERS = 2
QUEUE_LIMIT = 30  # Of a tenant: the rest is refused with 429.
LIMITS = (4, 16)  # Of requests in flight per rank.
SAMPLE_S = 0.5


async def watch(url: str, into: list[tuple[int, Mapping[str, float | None]]]) -> None:
    """Read the state of the limit, until cancelled."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            state = (await client.get(f"{url}/admin/state")).json()
            into.append((time.perf_counter_ns(), state["state"]["budget"]))
            await asyncio.sleep(SAMPLE_S)


async def send(setup: Setup, proxy: ProxyProcess) -> Run:
    """Send the requests of both tenants, and wait for every answer; the log is not read yet."""
    states: list[tuple[int, Mapping[str, float | None]]] = []
    watching = asyncio.ensure_future(watch(f"http://{proxy.host}:{proxy.admin_port}", states))
    url = f"http://{proxy.host}:{proxy.port}"
    unix_ns = time.time_ns() - time.perf_counter_ns()
    results = await asyncio.gather(
        *(
            replay(
                ReplaySettings(url, api_key=key_of(name), request_ids=name, seed=setup.seed),
                setup.requests(tenant),
                clock_ns=time.perf_counter_ns,
            )
            for tenant, name in enumerate(WEIGHTS)
        )
    )
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    start_ns = min(one.start_ns for one in results)
    samples = {name: one.samples for name, one in zip(WEIGHTS, results, strict=True)}
    tokens = [
        Held(
            name, one.output_tokens, (one.first_ns - start_ns) / 1e9, (one.last_ns - start_ns) / 1e9
        )
        for name, sent in samples.items()
        for one in sent
        if one.finished
    ]
    seen = [((time_ns - start_ns) / 1e9, state) for time_ns, state in states]
    return Run((start_ns + unix_ns) / 1e9, samples, tokens, [], seen)


def key_of(tenant: str) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant}"


def run_live(setup: Setup) -> Run:
    """Start engines and proxy, send, and end them."""
    tenants = setup.out / "tenants.toml"
    tenants.write_text(
        "\n".join(
            f'[[tenant]]\nname = "{name}"\nweight = {weight}\nqueue_limit = {QUEUE_LIMIT}\n'
            f'key_sha256 = ["{hashlib.sha256(key_of(name).encode()).hexdigest()}"]'
            for name, weight in WEIGHTS.items()
        ),
        encoding="utf-8",
    )
    emulate = f"emulate --json-ready --exit-with-stdin --port 0 --prefillers {PREFILLERS} "
    emulate += f"--ranks {RANKS} --batch {BATCH} --step-base-ms {setup.step_ms}"
    command = [sys.executable, "-m", "balanceroute.proxy", *emulate.split()]
    with emulated_engines(command) as engines:
        urls = {role: cast("list[str]", given) for role, given in engines.items()}
        flags = f"--port 0 --admin-port 0 --batch {BATCH} --fair-queue kv-token-seconds "
        flags += f"--aimd post5 --aimd-ttft-s {setup.target_s} --aimd-min {LIMITS[0]} "
        flags += f"--aimd-max {LIMITS[1]}"
        words = [*flags.split(), "--tenants", str(tenants)]
        words += ["--prefill", *urls["prefill"], "--decode", *urls["decode"]]
        addresses = urls["prefill"] + urls["decode"]
        with (
            running_proxy(words, engines=addresses, folder=setup.out) as proxy,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            run = runner.run(send(setup, proxy))
    # The log is whole once the proxy has ended.
    return replace(run, kv=kv_held(proxy.log, run.start_unix_s))


def read_flags() -> Setup:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/qos"), help="where to write")
    parser.add_argument("--phase-s", type=float, default=35.0, help="length of a phase")
    parser.add_argument("--step-ms", type=float, default=50.0, help="time of a decode step")
    parser.add_argument("--target-s", type=float, default=2.0, help="of the p99 TTFT")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    setup = Setup(**vars(parser.parse_args()))
    if not min(setup.phase_s, setup.step_ms, setup.target_s) > 0:
        parser.error("--phase-s, --step-ms and --target-s must be above 0")
    return setup


def main() -> int:
    """Run the phases."""
    setup = read_flags()
    setup.out.mkdir(parents=True, exist_ok=True)
    title = (
        f"{RANKS} ranks x batch {BATCH}, steps of {setup.step_ms:g} ms: about "
        f"{setup.capacity:.0f} requests per s; target of the p99 TTFT {setup.target_s:g} s"
    )
    print(f"{title}; {len(PHASES)} phases of {setup.phase_s:g} s\n", flush=True)
    run = run_live(setup)
    rows = [row_of(setup, run, phase, one) for phase in range(len(PHASES)) for one in WEIGHTS]
    found = failures(rows)
    print(table(rows))
    print(
        "\nShares, times and the first tokens within the target per second are measured without "
        f"the first {SETTLING * setup.phase_s:g} s of a phase. Refused: 429 and 503 with "
        "Retry-After.\n" + "\n".join(found or ["As it must be."])
    )
    told = asdict(setup) | {"out": str(setup.out)}
    report = {"config": told, "rows": [asdict(row) for row in rows], "failures": found}
    (setup.out / "qos.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_pictures({"qos": lambda: draw(setup, run, title)}, setup.out)
    return 1 if found else 0


if __name__ == "__main__":
    # So that the other processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
