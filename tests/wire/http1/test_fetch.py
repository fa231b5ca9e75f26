"""One small exchange: what is left of it when it is over."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import Response, WireError, WireFault

if TYPE_CHECKING:
    from tests.wire.conftest import Engine, RawConnection, Script

Cyclic = Callable[[], Counter[str]]
PAGE = b"x" * 30_000
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PAGE) + PAGE
TIMES = 5


async def get(
    endpoint: Endpoint,
    method: bytes = b"GET",
    *,
    timeout_s: float = 5.0,
    max_bytes: int = 1 << 20,
    cut: bool = False,
) -> Response:
    """Fetch a page."""
    return await fetch(
        endpoint, method, b"/", [], PAGE, timeout_s=timeout_s, max_bytes=max_bytes, cut=cut
    )


def telling(*pieces: bytes) -> "Script":
    async def tell(connection: "RawConnection") -> None:
        for piece in pieces:
            await connection.until(b"\r\n\r\n")
            await connection.exactly(len(PAGE))
            connection.send(piece)

    return tell


async def keep_silent(connection: "RawConnection") -> None:
    await connection.rest()


@pytest.mark.both_loops
async def test_nothing_is_left_of_pages(engine: "Engine", cyclic: Cyclic) -> None:
    async with engine(telling(*[WHOLE] * TIMES)) as raw:
        for _ in range(TIMES):
            assert (await get(raw.endpoint)).body == PAGE
        assert not cyclic()


@pytest.mark.parametrize(
    ("script", "options", "kind"),
    [
        (telling(WHOLE), {"max_bytes": 1000}, WireFault.TOO_LARGE),
        (telling(WHOLE[:-1]), {}, WireFault.RESET),
        (telling(b"HTTP/1.1 what\r\n\r\n"), {}, WireFault.PROTOCOL),
        (keep_silent, {"timeout_s": 0.001}, WireFault.TIMEOUT),
    ],
)
async def test_nothing_is_left_of_pages_that_do_not_come(
    engine: "Engine",
    cyclic: Cyclic,
    script: "Script",
    options: dict[str, float],
    kind: WireFault,
) -> None:
    async with engine(*[script] * TIMES) as raw:
        kinds = []
        for _ in range(TIMES):
            # A task may keep the error, and so all that it refers to.
            asked = asyncio.create_task(get(raw.endpoint, b"POST", **options))  # type: ignore[arg-type]
            await asyncio.wait([asked])
            error = asked.exception()
            assert isinstance(error, WireError)
            kinds.append(error.kind)
            del asked, error
        assert kinds == [kind] * TIMES
        left = cyclic()
        assert not left.keys() & {"Call", "Endpoint", "Response", "WireError", "_Collector"}


@pytest.mark.both_loops
async def test_nothing_is_left_of_one_that_is_cut(engine: "Engine", cyclic: Cyclic) -> None:
    async with engine(telling(WHOLE)) as raw:
        assert len((await get(raw.endpoint, max_bytes=1000, cut=True)).body) > 1000
        assert not cyclic().keys() & {"Call", "Response", "_Collector"}


async def test_nothing_is_left_of_calls_to_who_is_not_there(cyclic: Cyclic) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # And does not listen.
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        for _ in range(TIMES):
            asked = asyncio.create_task(get(endpoint, b"POST"))
            await asyncio.wait([asked])
            error = asked.exception()
            assert isinstance(error, WireError)
            assert error.kind is WireFault.CONNECT
            assert isinstance(error.__cause__, ConnectionRefusedError)
            del asked, error
        assert not cyclic()
