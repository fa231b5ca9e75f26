"""An emulated fleet in virtual time, and a client that speaks to its engines."""

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.support.played import played_by
from tests.support.site import Exchanged
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate import EmulatedFleet, EmulationSettings
from balanceroute.proxy.wire.http1.client import Endpoint

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG_S = 600.0  # Long enough for whatever ends by itself.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Lab:
    """A fleet and its client."""

    def __init__(self, fleet: EmulatedFleet, loop: VirtualLoop) -> None:
        self.fleet = fleet  # It serves a model named "tiny".
        self.loop = loop  # Its clock is virtual.
        self._endpoints: dict[int, Endpoint] = {}

    def send(
        self,
        engine: str,
        path: str,
        values: object,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Exchanged:
        """Begin an exchange with an engine; `values` may be JSON or bytes."""
        port = self.fleet.engine(engine).port
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        return self._send(port, method, path, body, headers or {})

    def _send(
        self, port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Exchanged:
        if port not in self._endpoints:
            self._endpoints[port] = Endpoint("127.0.0.1", port)
        exchanged = Exchanged()
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        exchanged.call = self._endpoints[port].request(
            method.encode(), path.encode(), fields, body, exchanged
        )
        return exchanged

    async def post(
        self, engine: str, path: str, values: object, headers: Mapping[str, str] | None = None
    ) -> Exchanged:
        """Make an exchange with an engine and wait for its end."""
        exchanged = self.send(engine, path, values, headers=headers)
        try:
            return await exchanged.end()
        finally:  # A cancelled wait leaves.
            exchanged.call.abort()

    async def get(self, engine: str, path: str) -> Exchanged:
        """Get something from an engine."""
        exchanged = self.send(engine, path, b"", method="GET")
        await exchanged.end()
        return exchanged

    async def get_url(self, url: str) -> Exchanged:
        """Get something by its URL."""
        address, _, path = url.removeprefix("http://").partition("/")
        exchanged = self._send(int(address.rpartition(":")[2]), "GET", f"/{path}", b"", {})
        await exchanged.end()
        return exchanged

    async def prefill(
        self,
        path: str,
        values: Mapping[str, Any],
        engine: str = "prefill/0",
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Exchanged:
        """Send the prefill leg of a request, as a proxy forms it."""
        body = {key: value for key, value in values.items() if key not in ("stream_options", "n")}
        body |= {"stream": False, "max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body |= {"kv_transfer_params": params or REMOTE_DECODE}
        name = None if request_id is None else {"X-Request-Id": request_id}
        return await self.post(engine, path, body, name)

    async def prefilled(
        self,
        path: str,
        values: Mapping[str, Any],
        engine: str = "prefill/0",
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Return a request's decode leg, once its prefill is done."""
        answer = await self.prefill(path, values, engine, request_id=request_id)
        assert answer.status == 200, answer.body
        return {**values, "kv_transfer_params": answer.json["kv_transfer_params"]}

    def leases(self) -> dict[str, int]:
        """Return how many leases ended how, without those that never did."""
        counts: dict[str, int] = self.fleet.stats()["leases"]
        return {end: count for end, count in counts.items() if count}

    def close(self) -> None:
        """Close the client's connections."""
        for endpoint in self._endpoints.values():
            endpoint.close()


def play(scenario: Callable[[Lab], Awaitable[None]], **changes: Any) -> None:
    """Play a scenario in virtual time, with a small fleet whose settings may be given."""
    settings: dict[str, Any] = {"model": "tiny", "prefillers": 1, "ranks": 2, "max_model_len": 1024}

    async def main(loop: VirtualLoop) -> None:
        fleet = EmulatedFleet(EmulationSettings(**(settings | changes)), rng=random.Random(7))
        await fleet.start("127.0.0.1", 8000)
        lab = Lab(fleet, loop)
        try:
            await scenario(lab)
        finally:
            lab.close()
            await fleet.close()

    run(main, seed=1, limit_s=100_000.0)


emulated = played_by(play)
