"""`balanceroute serve` as a process, in front of emulated engines on real sockets."""

import asyncio
import json
import os
import random
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.site import Exchanged

from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # Only ever waited for by a test that fails.
COMPLETIONS = "/v1/completions"
STREAM: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}
ENGINES = EmulationSettings(
    model="tiny",
    prefillers=1,
    ranks=2,
    step_base_ns=5_000_000,
    prefill_base_ns=1_000_000,
    transfer_base_ns=100_000,
)


class Client:
    """Speaks to one address."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._endpoint = Endpoint(HOST, port, ssl=context)

    def send(
        self, method: bytes, path: str, values: object = None, headers: "Headers | None" = None
    ) -> Exchanged:
        exchanged = Exchanged()
        body = b"" if values is None else json.dumps(values).encode()
        headers = headers or [(b"content-type", b"application/json")]
        exchanged.call = self._endpoint.request(method, path.encode(), headers, body, exchanged)
        return exchanged

    async def get(self, path: str) -> Exchanged:
        return await self.send(b"GET", path).end()

    async def post(self, path: str, values: object) -> Exchanged:
        return await self.send(b"POST", path, values).end()

    def close(self) -> None:
        self._endpoint.close()


class Served:
    """A running `balanceroute serve`."""

    def __init__(self, process: asyncio.subprocess.Process, line: str) -> None:
        self.process = process  # The process.
        self.line = line  # What it printed when it was ready.
        self.client: Client  # Speaks to its public listener.
        self.admin: Client  # Speaks to its admin listener.

    def ports(self) -> tuple[int, int]:
        public, admin = (word.rpartition(":")[2] for word in self.line.split(", "))
        return int(public), int(admin)

    async def exit(self) -> tuple[int, str]:
        """Wait for the end; return the status, and what else it printed and complained of."""
        out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode() + err.decode()


def command(*words: str) -> list[str]:
    """Return what starts a proxy: with the native library as TEST_NATIVE says, unless a word does."""
    native = os.environ.get("TEST_NATIVE", "")
    chosen = ["--native", native] if native and "--native" not in words else []
    return [sys.executable, "-m", "balanceroute.proxy", "serve", *words, *chosen]


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "BALANCEROUTE" not in name}


@asynccontextmanager
async def serving(
    prefill: list[str],
    decode: list[str],
    *flags: str,
    context: ssl.SSLContext | None = None,
    descriptors: int | None = None,
) -> AsyncIterator[Served]:
    """Serve before some engines, with at most so many file descriptors."""
    words = ["--prefill", *prefill, "--decode", *decode, "--port", "0", "--admin-port", "0"]
    limited = [] if descriptors is None else ["sh", "-c", 'ulimit -n "$0"; exec "$@"']
    limited += [] if descriptors is None else [str(descriptors)]
    process = await asyncio.create_subprocess_exec(
        *limited,
        *command(*words, "--log", "none", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain_environment(),
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().rstrip("\n")
        assert line, (await process.communicate())[1].decode()
        served = Served(process, line)
        public, admin = served.ports()
        served.client = Client(public, context)
        served.admin = Client(admin)
        yield served
        served.client.close()
        served.admin.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def engines(
    trust: ssl.SSLContext | None = None, **changes: Any
) -> AsyncIterator[EmulatedFleet]:
    """Emulated engines, in real time."""
    fleet = EmulatedFleet(replace(ENGINES, **changes), rng=random.Random(5), trust=trust)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


def play(main: Coroutine[Any, Any, None], patience_s: float = PATIENCE_S) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(patience_s):
            await main

    asyncio.run(guarded())


async def until_draining(served: Served) -> None:
    while not (await served.admin.get("/admin/state")).json["state"]["draining"]:
        pass


async def until_unready(served: Served) -> None:
    while (await served.admin.get("/ready")).status == 200:
        pass
