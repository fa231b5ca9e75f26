"""How far the admin page is behind the proxy, and what it costs the proxy when somebody looks.

    python scripts/bench_page.py [--ranks 144] [--changes 60] [--pairs 10]

Starts emulated engines and the proxy before them. Lag: it drains a decode rank, or takes it back, at drawn
times, and counts the time from before the order until the page's events tell of it. Cost: the time that the
proxy runs on a core in as many intervals with a viewer as without, in turns; in percent of a core. The
engines serve a small load meanwhile, which both kinds of interval have. Exits 1 when a goal is missed:
the 95th percentile of the lag at most 1 s, the cost at most 1 % of a core.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.testing.arguments import positive, several
from balanceroute.proxy.testing.soak.proxy_process import ProxyProcess, running_proxy

LAG_S, COST = 1.0, 0.01
INTERVAL_S = 5.0
# Between changes, at most: more than the page's own interval, so every phase of it is hit.
_PAUSE_S = 1.5
_CLIENTS = 4


class Viewer:
    """One who looks at the page: reads its events, and keeps the latest."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self._news = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read for ever."""
        async with client.stream("GET", "/admin/live") as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    ranks: list[dict[str, Any]] = json.loads(line[6:])["ranks"]
                    self.statuses = {rank["url"]: rank["status"] for rank in ranks}
                    self._news.set()

    async def see(self, url: str, status: str) -> None:
        """Return when a rank is shown to have this status."""
        while self.statuses.get(url) != status:
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[Viewer]:
    """Look at the page meanwhile."""
    viewer = Viewer()
    task = asyncio.create_task(viewer.read(client))
    try:
        yield viewer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lags(client: httpx.AsyncClient, urls: Sequence[str], changes: int) -> list[float]:
    """Return how long each change took to be seen, in seconds."""
    rng, found = random.Random(0), []
    async with watching(client) as viewer:
        for number in range(changes):
            url = urls[number // 2 % len(urls)]
            path, status = ("/drain", "draining") if number % 2 == 0 else ("", "up")
            await asyncio.sleep(rng.uniform(0.0, _PAUSE_S))
            began_s = time.monotonic()
            order = {"role": "decode", "url": url}
            answer = await client.post("/admin/instances" + path, json=order)
            answer.raise_for_status()
            async with asyncio.timeout(30.0):
                await viewer.see(url, status)
            found.append(time.monotonic() - began_s)
    return found


def ran_s(pid: int) -> float:
    """Return how long a process has run on a core (proc_pid_schedstat(5), all of its threads)."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


async def cost(client: httpx.AsyncClient, pid: int, *, watched: bool) -> float:
    """Return the share of a core that the proxy takes for an interval."""
    if watched:
        async with watching(client):
            return await cost(client, pid, watched=False)
    before_s, began_s = ran_s(pid), time.monotonic()
    await asyncio.sleep(INTERVAL_S)
    return (ran_s(pid) - before_s) / (time.monotonic() - began_s)


async def load(proxy: ProxyProcess) -> None:
    """Send requests for ever, a few at a time."""
    base = f"http://{proxy.host}:{proxy.port}"
    asked = {"model": "emulated", "prompt": "word " * 200, "max_tokens": 64}

    async def one(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post("/v1/completions", json=asked)
            answer.raise_for_status()

    async with httpx.AsyncClient(base_url=base, timeout=60.0) as client:
        await asyncio.gather(*(one(client) for _ in range(_CLIENTS)))


async def measure(
    proxy: ProxyProcess, urls: Sequence[str], changes: int, pairs: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the lags, and shares of a core without and with a viewer."""
    base = f"http://{proxy.host}:{proxy.admin_port}"
    working = asyncio.create_task(load(proxy))
    try:
        async with httpx.AsyncClient(
            base_url=base, timeout=httpx.Timeout(30.0, read=None)
        ) as client:
            found = await lags(client, urls, changes)
            shares = []
            for number in range(pairs):
                turns = (False, True) if number % 2 == 0 else (True, False)
                pair = {one: await cost(client, proxy.pid, watched=one) for one in turns}
                shares.append((pair[False], pair[True]))
        if working.done():
            await working  # It failed.
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return found, shares


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, default=144, help="(default 144)")
    parser.add_argument("--changes", type=several, default=60, help="(default 60)")
    parser.add_argument("--pairs", type=several, default=10, help="of intervals (default 10)")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port=0"]
    command += [f"--ranks={arguments.ranks}", "--json-ready", "--exit-with-stdin"]
    with tempfile.TemporaryDirectory() as folder, emulated_engines(command) as engines:
        urls = {role: cast("list[str]", found) for role, found in engines.items()}
        flags = ["--port", "0", "--admin-port", "0", "--batch", "16"]
        for role, of_role in urls.items():
            flags += [f"--{role}", *of_role]
        serving = urls["prefill"] + urls["decode"]
        with running_proxy(flags, engines=serving, folder=Path(folder)) as proxy:
            measured = measure(proxy, urls["decode"], arguments.changes, arguments.pairs)
            found, shares = asyncio.run(measured)
    cuts = statistics.quantiles(found, n=20, method="inclusive")
    more = [after - before for before, after in shares]
    mean, error = statistics.fmean(more), statistics.stdev(more) / len(more) ** 0.5
    base = statistics.fmean(before for before, _ in shares)
    print(f"{arguments.ranks} ranks, {len(found)} changes, {len(more)} pairs of {INTERVAL_S:.0f} s")
    print(
        f"lag: p50 {cuts[9]:.2f} s, p95 {cuts[18]:.2f} s, most {max(found):.2f} s (goal p95 {LAG_S:.1f} s)"
    )
    print(
        f"cost: {mean:+.2%} ± {error:.2%} of a core (goal {COST:.0%}); without a viewer {base:.1%}"
    )
    sys.exit(cuts[18] > LAG_S or mean > COST)


if __name__ == "__main__":
    main()
