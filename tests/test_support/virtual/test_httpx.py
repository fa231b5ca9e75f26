"""httpx, over anyio and asyncio, runs on the virtual loop."""

import httpx
import pytest
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.recorder import Recorder
from tests.support.virtual.runner import run

URL = "http://10.0.0.1:8000/health"


def answer(end: Recorder, _: bytes) -> None:
    if end.received.endswith(b"\r\n\r\n"):
        end.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def test_httpx_gets_answers_timeouts_and_refusals_in_virtual_time() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        listener = await loop.create_server(lambda: Recorder(on_data=answer), "10.0.0.1", 8000)
        async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
            assert (await client.get(URL)).text == "ok"
            loop.network.silence("10.0.0.1", 8000)
            with pytest.raises(httpx.ConnectTimeout):
                await client.get(URL)
            loop.network.kill("10.0.0.1", 8000)
            with pytest.raises(httpx.ConnectError):
                await client.get(URL)
            loop.network.restore("10.0.0.1", 8000)
            assert (await client.get(URL)).text == "ok"
        listener.close()
        return [loop.time()]

    assert run(main, seed=1) == [pytest.approx(1030.0, abs=0.01)]
