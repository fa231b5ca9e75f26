"""PRIORITY_UPDATE (RFC 9218 section 7.2) of a client that others wrote changes which answer is sent first."""

import asyncio
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import encode_frame
from tests.wire.http3.site import http3_site

from balanceroute.proxy.live.settings.declared import Http3Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http3_client import Http3Client

    from balanceroute.proxy.wire.messages import HttpRequest, Reply

BYTES = 600_000
PRIORITY_UPDATE = 0xF0700


def answer(request: "HttpRequest", reply: "Reply") -> None:
    reply.send(200, [], request.path * (BYTES // len(request.path)))


def update(client: "Http3Client", number: int, value: bytes) -> None:
    """Say that the answer of a stream has another priority from now on."""
    control = client.h3._local_control_stream_id
    assert control is not None
    frame = encode_frame(PRIORITY_UPDATE, encode_uint_var(number) + value)
    client.quic.send_stream_data(control, frame)
    client.transmit()


async def first_answered(client: "Http3Client", numbers: list[int]) -> int:
    """Return the stream whose answer is whole first, once both are."""
    ends = [asyncio.create_task(client.streams[one].over.wait()) for one in numbers]
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    await asyncio.gather(*ends)
    return numbers[ends.index(done.pop())]


@pytest.mark.parametrize(
    ("value", "order"), [(None, "ab"), (b"u=6", "ab"), (b"u=0", "ba"), (b"u=0, i", "ba")]
)
async def test_a_running_answer_overtakes(
    tmp_path: "Path", value: bytes | None, order: str
) -> None:
    """`a` is above `b` by their headers, until `b` is raised in the middle of `a`."""
    settings = Http3Settings(http3_order="abs")
    async with (
        http3_site(answer, tmp_path, settings=settings) as site,
        site.client(max_data=1 << 24, max_stream_data=1 << 24) as client,
    ):
        numbers = [
            client.begin(b"GET", path, [(b"priority", priority)])
            for path, priority in ((b"/a", b"u=3"), (b"/b", b"u=5"))
        ]
        while not client.streams[numbers[0]].body:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        if value is not None:
            update(client, numbers[1], value)
        first = await first_answered(client, numbers)
        assert "ab"[numbers.index(first)] == order[0]
        for number, path in zip(numbers, (b"/a", b"/b"), strict=True):
            body = client.streams[number].body
            assert bytes(body) == path * (BYTES // len(path))
