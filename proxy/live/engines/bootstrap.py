"""What a Mooncake prefiller's bootstrap server tells: the engine's id, new with each start.

`GET <bootstrap>/query` of vLLM 0.32 answers {"<dp rank>": {"engine_id": ..., "worker_addr": ...}}.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.faults import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Status

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
# Bootstrap servers that are asked at a time.
_AT_ONCE = 64


def read_identity(page: bytes, bootstrap: str) -> BootstrapIdentity:
    """Return the identity of a prefiller's first data-parallel rank.

    Raises:
        FetchError: The page is not what a bootstrap server answers.
    """
    try:
        engine_id = json.loads(page)["0"]["engine_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine") from None
    if not isinstance(engine_id, str) or not engine_id:
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine")
    return BootstrapIdentity(engine_id, bootstrap)


class Identification:
    """Keeps the identities of prefillers up to date.

    Args:
        instances: Those that name a bootstrap server are asked for.
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        identified: Called with a prefiller when its identity is another.
    """

    def __init__(
        self,
        instances: Instances,
        fetch: Callable[[str], Awaitable[bytes]],
        identified: Callable[[Prefiller, BootstrapIdentity], None],
    ) -> None:
        self._instances = instances
        self._fetch = fetch
        self._identified = identified

    async def run(self) -> None:
        """Ask bootstrap servers who their engines are, again and again: each start has a new id."""
        while True:
            free = asyncio.Semaphore(_AT_ONCE)
            asked = [
                self._ask(prefiller, prefiller.bootstrap, free)
                for prefiller in self._instances.up()
                if prefiller.bootstrap is not None
            ]
            await asyncio.gather(*asked)
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self, prefiller: Prefiller, bootstrap: str, free: asyncio.Semaphore) -> None:
        try:
            async with free:
                page = await self._fetch(f"{bootstrap}/query")
            identity = read_identity(page, bootstrap)
        except FetchError as error:
            if prefiller.identity is None:
                fields = {"url": prefiller.name, "reason": str(error)}
                _log.warning("no bootstrap", extra={"fields": fields})
            return
        # Quarantine says that the engine may be another one when it comes back.
        if prefiller.status is Status.UP and identity != prefiller.identity:
            prefiller.identity = identity
            self._identified(prefiller, identity)
