"""Bodies that are being read: large ones give way to each other and to everything else."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tests.extended import usually
from tests.native import needs_native
from tests.support.chaos.world import World
from tests.support.played import in_real_time
from tests.support.site import Site, answering, play, served

from balanceroute.proxy.live.frontend.gateway import BodyQueue
from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.form_body import refuse_internal_parts
from balanceroute.proxy.wire.http1.pump import load_library

if TYPE_CHECKING:
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.wire.http1.pump import Pump
    from balanceroute.proxy.wire.messages import Reply

SMALL = b'{"prompt": "a"}'


def large(elements: int) -> bytes:
    return b'{"prompt": [' + b"[]," * elements + b"1]}"


@dataclass
class Reader:
    """Who waits for a body."""

    closed: bool = False
    results: list[RequestBody | BodyError] = field(default_factory=list)

    @property
    def reply(self) -> "Reply":
        return cast("Reply", self)

    def take(self, result: RequestBody | BodyError) -> None:
        self.results.append(result)


async def rounds() -> None:
    for _ in range(1_000):
        await asyncio.sleep(0)


def test_a_small_body_is_read_at_once() -> None:
    good, bad = Reader(), Reader()
    queue = BodyQueue()
    queue.read(SMALL, good.reply, good.take)
    queue.read(b"[]", bad.reply, bad.take)
    assert isinstance(good.results[0], RequestBody)
    assert isinstance(bad.results[0], BodyError)


@in_real_time()
async def test_large_bodies_are_read_in_turn_and_in_many_rounds_of_the_loop() -> None:
    queue = BodyQueue()
    first, second, broken = Reader(), Reader(), Reader()
    queue.read(large(90_000), first.reply, first.take)
    queue.read(large(50_000), second.reply, second.take)
    queue.read(large(60_000)[:-1], broken.reply, broken.take)
    rounds = 0
    order: list[Reader] = []
    while len(order) < 3:
        await asyncio.sleep(0)
        rounds += 1
        order += [r for r in (first, second, broken) if r.results and r not in order]
    # The first to come is not the first to end: the others are shorter.
    assert order == [second, broken, first]
    assert rounds > 60
    assert isinstance(first.results[0], RequestBody)
    assert isinstance(broken.results[0], BodyError)


@in_real_time()
async def test_a_body_that_nobody_waits_for_is_read_no_further() -> None:
    queue = BodyQueue()
    gone, there = Reader(), Reader()
    queue.read(large(90_000), gone.reply, gone.take)
    queue.read(large(50_000), there.reply, there.take)
    gone.closed = True
    await rounds()
    assert gone.results == []
    assert len(there.results) == 1
    # And it begins again after it was empty.
    queue.read(large(50_000), there.reply, there.take)
    await rounds()
    assert len(there.results) == 2


@pytest.mark.parametrize(
    "path",
    usually(
        ["/v1/completions"],
        ["/v1/completions", "/v1/messages", "/v1/chat/completions/batch"],
    ),
)
@pytest.mark.parametrize(
    "end",
    [b"", b"\xff", b'", "a": NaN}', b'", "model": "other"}', b'", "a": ' + b"[" * 3000],
    ids=["unfinished", "UTF-8", "NaN", "twice", "deep"],
)
@pytest.mark.parametrize("size", [1, 300_000], ids=["small", "large"])
@served()
async def test_nothing_is_left_of_a_body_that_is_refused(
    site: Site, cyclic: Callable[[], Counter[str]], path: str, end: bytes, size: int
) -> None:
    body = b'{"model": "tiny", "prompt": "' + b"x" * size + end
    kind = [(b"content-type", b"application/json")]
    for _ in range(3):
        refused = await site.send(path, body, headers=kind).end()
        assert 400 <= refused.status < 500
    assert not cyclic().keys() & {"Request", "RequestBody", "BodyError", "Http1Reply"}


class IdlePump:
    """The native library without streams, as in virtual time there are no descriptors."""

    def __init__(self) -> None:
        self.library = self
        self.streams = self.events = self.away = self.scans = self.bodies = 0
        self.tokens = np.zeros(1, np.uint32)
        self._library = load_library()

    def br_scan(self, *arguments: Any) -> int:
        self.scans += 1
        said: int = self._library.br_scan(*arguments)
        return said

    def lend(self, *_: object) -> None:
        """Move none."""

    def new_gaps(self) -> tuple[list[int], float]:
        return [], 0.0

    def close(self) -> None:
        """Nothing is open."""


@needs_native
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("size", [1, 300_000], ids=["small", "large"])
def test_a_large_body_is_read_natively_where_the_library_is(
    monkeypatch: pytest.MonkeyPatch, path: str, size: int
) -> None:
    pump, make = IdlePump(), World._make_environment

    def make_environment(world: World, *arguments: Any) -> "Environment":
        return replace(make(world, *arguments), pump=cast("Pump", pump))

    monkeypatch.setattr(World, "_make_environment", make_environment)
    talk = [{"role": "user", "content": "t" * size}]
    values = {
        "model": "tiny",
        "max_tokens": 1,
        "max_output_tokens": 1,
        "messages": talk,
        "input": talk,
    }

    async def scenario(site: Site) -> None:
        asked = await site.send(path, values).end()
        assert asked.status == 200
        assert pump.scans == pump.bodies == (size > 1)
        prompts = [seen.values["messages"] for seen in site.received("prefill", path)]
        assert prompts == [talk]

    play(scenario)


# Forms must not carry what steers KV transfer, however a part is spelled.


TRANSCRIPTIONS = "/v1/audio/transcriptions"
FORM = b"multipart/form-data; boundary=B"
NAMED = b'Content-Disposition: form-data; name="vllm_xargs"'
SOUND = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
XARGS = b'{"kv_transfer_params": "x"}'
REFUSED = "vllm_xargs must not have kv_transfer_params"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"--B\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--B--\r\n"


def said(content_type: bytes, body: bytes) -> str:
    """Return what is said of a form; empty if it passes."""
    try:
        refuse_internal_parts([(b"content-type", content_type)], body)
    except BodyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (NAMED, XARGS),
        (NAMED, b' \r\n{"a": 1, "kv_transfer\\u005fparams": {"do_remote_decode": true}}'),
        (NAMED, b'{"a": "\xe9", "kv_transfer_params": 1}'),
        (NAMED.lower() + b"\r\nContent-Type: application/json", XARGS),
        (b"content-disposition: form-data; name=vllm_xargs", XARGS),
        (b"content-disposition: form-data; name*=utf-8''vllm%5Fxargs", XARGS),
        (b'content-disposition: form-data; NAME*0="vllm_"; name*1="xargs"', XARGS),
        (SOUND + b"\r\n" + NAMED, XARGS),
        (NAMED + b"\r\n" + SOUND, XARGS),
    ],
)
def test_members_that_steer_kv_transfer_are_refused(head: bytes, text: bytes) -> None:
    assert said(FORM, form((SOUND, b"\x00--\xff"), (head, text))) == REFUSED
    assert said(b'multipart/form-data; charset=UTF-8; boundary="B"', form((head, text))) == REFUSED


@pytest.mark.parametrize(
    "body",
    [
        form((SOUND, XARGS), (NAMED, b'{"mine": 1}')),
        form((NAMED, b"no JSON"), (NAMED, b"")),
        form((b"x", XARGS)),
        b"--B\r\nno end",
        XARGS,
        b"",
    ],
)
def test_other_forms_pass(body: bytes) -> None:
    assert said(FORM, body) == ""
    assert said(b"multipart/form-data", body) == ""


def test_what_an_engine_would_read_otherwise_is_refused() -> None:
    body = form((NAMED, XARGS))
    assert said(FORM + b"; charset=utf-16", body) == "the form's charset must be utf-8"
    assert said(FORM, b"--B\r\n" * 3_000) == "the form has more than 2000 parts"
    long = form((b"a: " + bytes(20_000).replace(b"\0", b"b") + b"\r\n" + NAMED, XARGS))
    assert said(FORM, long) == "the head of a part of the form is too long"
    deep = form((NAMED, b"[" * 100_000))
    assert said(FORM, deep) == "vllm_xargs is nested too deeply"
    with pytest.raises(BodyError):
        refuse_internal_parts([(b"content-type", b"a/b"), (b"content-type", FORM)], body)


@served()
async def test_a_form_that_steers_kv_transfer_reaches_no_engine(site: Site) -> None:
    """An engine ends when such members are no object: one form would take down every prefiller."""
    site.handlers[TRANSCRIPTIONS.encode()] = answering(200, b"{}")
    headers = [(b"content-type", FORM)]
    parts = (SOUND, b"\x00"), (b'Content-Disposition: form-data; name="model"', b"tiny")
    refused = await site.post(TRANSCRIPTIONS, form(*parts, (NAMED, XARGS)), headers)
    assert (refused.status, refused.json["error"]["message"]) == (400, REFUSED)
    assert refused.json["error"]["param"] == "vllm_xargs"
    assert not site.received("prefill", TRANSCRIPTIONS)
    whole = form(*parts, (NAMED, b'{"mine": 1}'))
    passed = await site.post(TRANSCRIPTIONS, whole, headers)
    assert passed.status == 200
    (seen,) = site.received("prefill", TRANSCRIPTIONS)
    assert seen.request.body == whole
