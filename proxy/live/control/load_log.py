"""The load log: the load of every decode rank by the proxy's ledger, sampled at a fixed interval.

One JSON object a line:

    time_s   Wall-clock time of the sample, seconds since 1970.
    loads    By the rank's name, four integers: KV tokens of its started requests, their slots, KV
             tokens of all requests bound to it, and their slots. Started requests are in the rank's
             batch; the other bound ones are on their way there.

A sample is what a decision made at that instant would go by. Removed ranks are left out.
`balanceroute validate` compares the samples with the engines' own step traces.
"""

import asyncio
from collections.abc import Callable

from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.scheduling.driver import Driver
from balanceroute.proxy.live.telemetry.process_log import json_line


class LoadLog:
    """Samples the ledger of a driver's scheduler."""

    def __init__(
        self,
        driver: Driver,
        *,
        interval_s: float,
        unix_s: Callable[[], float],
        write: Callable[[bytes], object],
    ) -> None:
        self._driver = driver
        self._interval_s = interval_s
        self._unix_s = unix_s
        self._write = write

    async def run(self) -> None:
        while True:
            self._write(self.sample())
            await asyncio.sleep(self._interval_s)

    def sample(self) -> bytes:
        """Return a line, with its newline. O(ranks + live requests)."""
        self._driver.decisions.follow()
        scheduler = self._driver.scheduler
        ledger = scheduler.ledger
        # Only the whole load is kept by rank. Few requests are on their way at a time.
        under_way = [0] * len(ledger.loads)
        for request in scheduler.requests.values():
            if request.rank is not None and not request.started:
                under_way[request.rank] += ledger.kv_tokens(request.request)
        loads: dict[str, list[int]] = {}
        for rank in self._driver.instances.ranks:
            if rank.status is not Status.REMOVED:
                bound_tokens = int(ledger.loads[rank.id])
                loads[rank.name] = [
                    bound_tokens - under_way[rank.id],
                    int(ledger.started[rank.id]),
                    bound_tokens,
                    int(ledger.bound[rank.id]),
                ]
        return json_line({"time_s": round(self._unix_s(), 6), "loads": loads})
