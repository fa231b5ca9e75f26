"""The endpoint picker: what it answers to a gateway's messages, kept to the protocol or not."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
from tests.live.served import ENGINES, PATIENCE_S, Client, engines, serving
from tests.live.settings.configs import secret_file
from tests.support.played import play_in_real_time
from tests.support.site import Site, play, served

grpc = pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc.v3")

from envoy.config.core.v3 import base_pb2  # noqa: E402
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb  # noqa: E402
from google.protobuf import wrappers_pb2  # noqa: E402

from balanceroute.proxy.live.picker import Choices, Picker  # noqa: E402
from balanceroute.proxy.live.selection import endpoint_of  # noqa: E402
from balanceroute.proxy.live.telemetry.record import Outcome  # noqa: E402
from balanceroute.proxy.wire.messages import BodyBudget  # noqa: E402

FLAGS = {"batch": 2, "scrape_interval_s": 0.5, "lease_s": 300}
KEY = "x-gateway-destination-endpoint"
BODY = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 20}).encode()
PATH = "/v1/completions"


def picker_of(site: Site, mode: str = "coordinator", **settings: Any) -> Picker:
    """Return a picker that nobody listens for, as it would stand beside the site's proxy."""
    proxy = site.world.proxy
    limits = {name: settings.pop(name) for name in list(settings) if name.endswith("_bytes")}
    config = replace(
        proxy.config,
        gateway=replace(proxy.config.gateway, pick=mode, **settings),
        limits=replace(proxy.config.limits, **limits),
    )
    choices = Choices(config, proxy._groups, proxy.gateway, lambda: 0.0)
    picker = Picker(config, choices)
    picker.bodies = BodyBudget(config.limits.body_budget_bytes)
    return picker


class AbortedError(Exception):
    """The stream of messages ended with a gRPC error."""


class Context:
    """What gRPC gives a stream."""

    async def abort(self, code: Any, words: str) -> None:
        raise AbortedError(code, words)


class Gateway:
    """One request of a gateway: its messages, and what is answered."""

    def __init__(self, picker: Picker) -> None:
        self.answers: list[Any] = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._come = asyncio.Event()
        self.task = asyncio.create_task(self._run(picker))

    async def _run(self, picker: Picker) -> None:
        try:
            async for answer in picker.Process(self._sent(), Context()):
                self.answers.append(answer)
                self._come.set()
        finally:
            self._come.set()

    async def _sent(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not None:
            yield message

    def head(
        self,
        headers: dict[str, str] | None = None,
        *,
        path: str = PATH,
        method: str = "POST",
        end: bool = False,
        hints: list[str] | None = None,
        mode: int | None = None,
    ) -> "Gateway":
        values = {":method": method, ":path": path, "content-type": "application/json"}
        fields = [
            base_pb2.HeaderValue(key=key, raw_value=value.encode())
            for key, value in (values | (headers or {})).items()
        ]
        message = pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(
                headers=base_pb2.HeaderMap(headers=fields), end_of_stream=end
            )
        )
        if hints is not None:
            subset = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            subset.update({f"{KEY}-subset": hints})
        if mode is not None:
            message.protocol_config.request_body_mode = mode
        return self.send(message)

    def body(self, data: bytes = BODY, *, end: bool = True) -> "Gateway":
        part = pb.HttpBody(body=data, end_of_stream=end)
        return self.send(pb.ProcessingRequest(request_body=part))

    def answer_begins(self, status: int = 200) -> "Gateway":
        fields = [base_pb2.HeaderValue(key=":status", raw_value=b"%d" % status)]
        headers = pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=fields))
        return self.send(pb.ProcessingRequest(response_headers=headers))

    def send(self, message: Any) -> "Gateway":
        self._messages.put_nowait(message)
        return self

    async def until(self, count: int) -> list[Any]:
        """Wait for so many answers."""
        while len(self.answers) < count:
            assert not self.task.done(), (self.answers, self.task)
            self._come.clear()
            await self._come.wait()
        return self.answers

    async def end(self) -> list[Any]:
        """End the stream, as the gateway does when its request is over."""
        self._messages.put_nowait(None)
        await self.task
        return self.answers

    async def destination(self) -> str:
        """Wait for where the request goes; both places must say the same."""
        (first, *_) = await self.until(1)
        assert first.WhichOneof("response") == "request_headers", first
        fields = first.request_headers.response.header_mutation.set_headers
        values = {one.header.key: one.header.raw_value.decode() for one in fields}
        assert first.dynamic_metadata["envoy.lb"][KEY] == values[KEY]
        assert first.request_headers.response.clear_route_cache
        return str(values[KEY]).split(",", maxsplit=1)[0]

    async def refusal(self) -> tuple[int, Any]:
        """Wait until it is refused; return the status and the error that its client gets."""
        (answer,) = await self.end()
        immediate = answer.immediate_response
        fields = {one.header.key for one in immediate.headers.set_headers}
        assert "content-type" in fields
        return immediate.status.code, json.loads(immediate.body)["error"]["message"]


def profile(name: str, request_id: str = "r1") -> dict[str, str]:
    return {"epp-profile": name, "x-request-id": request_id}


def told(answer: Any) -> dict[str, str]:
    """Return the headers that an answer sets."""
    fields = answer.request_headers.response.header_mutation.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in fields}


def pieces(answers: list[Any]) -> list[tuple[bytes, bool]]:
    """Return the pieces of the body that go on, each with whether it is the last."""
    found = [
        one.request_body.response.body_mutation.streamed_response
        for one in answers
        if one.WhichOneof("response") == "request_body"
    ]
    return [(one.body, one.end_of_stream) for one in found]


def places(site: Site) -> tuple[list[str], list[str]]:
    instances = site.world.proxy.deployment.instances
    return [*map(endpoint_of, instances.prefillers)], [*map(endpoint_of, instances.ranks)]


async def prefilled(picker: Picker, request_id: str = "r1") -> Gateway:
    """Bring a request through its prefill."""
    gateway = Gateway(picker).head(profile("prefill", request_id)).body()
    await gateway.destination()
    await gateway.answer_begins().end()
    return gateway


@served(flags=FLAGS)
async def test_a_coordinator_gets_a_prefiller_then_a_rank(site: Site) -> None:
    picker, (prefillers, ranks) = picker_of(site), places(site)
    first = Gateway(picker).head(profile("prefill")).body()
    assert await first.destination() in prefillers
    answers = await first.answer_begins().end()
    assert pieces(answers) == [(BODY, True)]
    assert len(answers) == 3
    books = site.world.proxy.deployment.driver.scheduler
    assert sum(books.prefillers.prefills) == 1  # Until its rank is asked for.
    second = Gateway(picker).head(profile("decode")).body()
    assert await second.destination() in ranks
    assert sum(books.prefillers.prefills) == 0
    second.answer_begins()
    await second.until(3)
    assert books.ledger.bound.sum() == 1
    await second.end()
    (record,) = await site.ended()
    assert (record.outcome, record.max_tokens, record.request_id) == (Outcome.OK, 20, "r1")


@served(flags={**FLAGS, "scrape_interval_s": 1000})
async def test_a_decode_call_is_held_until_a_rank_has_a_slot(site: Site) -> None:
    picker, (_, ranks) = picker_of(site), places(site)
    held = []
    for i in range(2 * len(ranks)):
        await prefilled(picker, f"held{i}")
        held.append(Gateway(picker).head(profile("decode", f"held{i}")).body())
        await held[-1].destination()
    await prefilled(picker, "last")
    last = Gateway(picker).head(profile("decode", "last")).body()
    await asyncio.sleep(65.0)
    assert not last.answers
    await held[0].answer_begins().end()
    assert await last.destination() in ranks
    for one in (*held[1:], last):
        await one.end()
    assert len(picker.choices.selector) == picker.streams == 0


@served(flags=FLAGS)
async def test_a_body_in_pieces_is_read_as_a_whole_and_goes_on(site: Site) -> None:
    picker = picker_of(site)
    gateway = Gateway(picker).head(profile("prefill"))
    for piece in (BODY[:5], b"", BODY[5:9]):
        gateway.body(piece, end=False)
    await asyncio.sleep(0.1)
    assert not gateway.answers  # A choice depends on the whole.
    gateway.body(BODY[9:])
    await gateway.until(2)
    gateway.body(b"", end=True)  # Some gateways end a body twice.
    answers = await gateway.answer_begins(500).end()
    assert pieces(answers) == [(BODY, True)]


@served(flags=FLAGS)
async def test_trailers_end_a_body_too(site: Site) -> None:
    gateway = Gateway(picker_of(site)).head(profile("prefill")).body(end=False)
    gateway.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    answers = await gateway.until(3)
    assert pieces(answers) == [(BODY, False)]
    assert answers[-1].WhichOneof("response") == "request_trailers"
    await gateway.end()
    site.world.proxy.deployment.driver.shut_down()


@served(flags=FLAGS)
async def test_an_answers_body_goes_on_unread(site: Site) -> None:
    picker = picker_of(site)
    await prefilled(picker)
    gateway = Gateway(picker).head(profile("decode")).body().answer_begins()
    for piece, end in ((b"data: {", False), (b"\xff", True)):
        part = pb.HttpBody(body=piece, end_of_stream=end)
        gateway.send(pb.ProcessingRequest(response_body=part))
    gateway.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    *_, one, other, trailers = await gateway.end()
    parts = [a.response_body.response.body_mutation.streamed_response for a in (one, other)]
    assert [(a.body, a.end_of_stream) for a in parts] == [(b"data: {", False), (b"\xff", True)]
    assert trailers.WhichOneof("response") == "response_trailers"


@served(flags=FLAGS)
async def test_hints_of_the_gateway_are_obeyed(site: Site) -> None:
    picker, (prefillers, ranks) = picker_of(site), places(site)
    subset = [prefillers[1], ranks[1]]
    for i in range(2):
        first = Gateway(picker).head(profile("prefill", f"r{i}"), hints=subset).body()
        assert await first.destination() == prefillers[1]
        await first.answer_begins().end()
        # As a header, and for a request whose prefill had other hints.
        header = {f"{KEY}-subset": f"{ranks[0]}, 10.9.9.9:1"}
        second = Gateway(picker).head(profile("decode", f"r{i}") | header).body()
        assert await second.destination() == ranks[0]
        (answer, *_) = second.answers
        assert told(answer)[KEY] == ranks[0]  # No other engine is named beside it.
        await second.end()
    for nobody in (["10.9.9.9:1"], [], ["", "x" * 10_000]):
        gateway = Gateway(picker).head(profile("prefill"), hints=nobody).body()
        assert (await gateway.refusal())[0] == 503
    many = Gateway(picker).head(profile("prefill"), hints=[f"h{i}:1" for i in range(5000)]).body()
    assert (await many.refusal())[0] == 400


@served(flags=FLAGS)
async def test_hints_without_the_key_allow_all(site: Site) -> None:
    gateway = Gateway(picker_of(site))
    head = pb.HttpHeaders(
        headers=base_pb2.HeaderMap(
            headers=[
                base_pb2.HeaderValue(key=key, raw_value=value.encode())
                for key, value in {":method": "POST", ":path": PATH, **profile("decode")}.items()
            ]
        )
    )
    message = pb.ProcessingRequest(request_headers=head)
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"other": "1"})
    assert await gateway.send(message).body().destination() in places(site)[1]
    await gateway.answer_begins().end()


@served(flags=FLAGS)
async def test_other_engines_are_named_to_fall_back_on(site: Site) -> None:
    for count in (0, 1, 8):
        gateway = Gateway(picker_of(site, pick_fallbacks=count)).head(profile("decode")).body()
        await gateway.destination()
        named = told(gateway.answers[0])[KEY].split(",")
        assert len(named) == len({*named}) == min(1 + count, 2)
        assert {*named} <= {*places(site)[1]}
        await gateway.end()


@served(flags=FLAGS)
async def test_a_sidecar_gets_both_engines_at_once(site: Site) -> None:
    picker, (prefillers, ranks) = picker_of(site, "sidecar"), places(site)
    client = {"x-prefiller-host-port": "10.6.6.6:1", "x-data-parallel-rank": "7"}
    gateway = Gateway(picker).head({"x-request-id": "r1"} | client).body()
    assert await gateway.destination() in ranks
    assert told(gateway.answers[0])["x-prefiller-host-port"] in prefillers
    gone = gateway.answers[0].request_headers.response.header_mutation.remove_headers
    assert {"x-data-parallel-rank", "x-encoder-hosts-ports"} <= {*gone}
    books = site.world.proxy.deployment.driver.scheduler
    await asyncio.sleep(5.0)
    assert sum(books.prefillers.held_tokens) > 0  # It computes, until the answer begins.
    gateway.answer_begins()
    await gateway.until(3)
    assert sum(books.prefillers.held_tokens) == 0
    await gateway.end()


@served(flags=FLAGS)
async def test_conformance_tests_choose_if_they_may(site: Site) -> None:
    _, ranks = places(site)
    wish = profile("decode") | {"test-epp-endpoint-selection": ranks[1]}
    for _ in range(3):
        gateway = Gateway(picker_of(site, pick_test_header=True)).head(wish).body()
        assert await gateway.destination() == ranks[1]
        answers = await gateway.answer_begins().end()
        fields = answers[-1].response_headers.response.header_mutation.set_headers
        (field,) = fields
        assert field.header.key == "x-conformance-test-served-endpoint"
        assert field.header.raw_value.decode() == ranks[1]
    elsewhere = wish | {"test-epp-endpoint-selection": "10.9.9.9:1"}
    gateway = Gateway(picker_of(site, pick_test_header=True)).head(elsewhere).body()
    assert (await gateway.refusal())[0] == 503
    gateway = Gateway(picker_of(site)).head(elsewhere).body()  # It is off.
    assert await gateway.destination() in ranks
    await gateway.end()


@served(flags=FLAGS)
async def test_a_request_that_is_no_generation_goes_to_a_rank(site: Site) -> None:
    picker = picker_of(site)
    gateway = Gateway(picker).head(path="/v1/models", method="GET", end=True)
    assert await gateway.destination() in places(site)[1]
    assert len(await gateway.end()) == 1
    gateway = Gateway(picker).head(path="/tokenize")
    await gateway.destination()
    gateway.body(b"ab", end=False).body(b"c")
    assert pieces(await gateway.end()) == [(b"ab", False), (b"c", True)]


@served(flags=FLAGS)
@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        (profile("encode"), BODY, 501, "no encoders"),
        (profile("train"), BODY, 400, "prefill or decode"),
        (profile("decode") | {"prefer": "wait=5, If-Available;x=1"}, BODY, 412, "has this prompt"),
        (profile("prefill"), b"{", 400, ""),
        (profile("prefill"), b"[1]", 400, ""),
        (profile("prefill"), b'{"prompt": "a", "stream": 7}', 400, "stream"),
        (profile("prefill"), b'{"prompt": "a", "n": 4096}', 400, "n must be"),
        (profile("prefill") | {"x-big": "y" * 40_000}, BODY, 431, "too large"),
        (profile("prefill") | {f"x-{i}": "y" for i in range(200)}, BODY, 431, "too many"),
    ],
)
async def test_what_cannot_be_is_refused(
    site: Site, headers: dict[str, str], body: bytes, status: int, words: str
) -> None:
    picker = picker_of(site)
    code, message = await Gateway(picker).head(headers).body(body).refusal()
    assert code == status
    assert words in message
    assert len(picker.choices.selector) == picker.streams == picker.bodies.used == 0


@served(flags=FLAGS)
async def test_bodies_are_bounded(site: Site) -> None:
    picker = picker_of(site, body_limit_bytes=1000, body_budget_bytes=1500)
    gateway = Gateway(picker).head(profile("prefill")).body(b" " * 600, end=False)
    gateway.body(b" " * 401, end=False)
    assert (await gateway.refusal())[0] == 413
    first = Gateway(picker).head(profile("prefill")).body(b" " * 900, end=False)
    await asyncio.sleep(0.1)
    second = Gateway(picker).head(profile("prefill")).body(b" " * 900, end=False)
    assert (await second.refusal())[0] == 503
    with pytest.raises(AbortedError):
        await first.end()
    assert picker.bodies.used == picker.streams == 0


@served(flags=FLAGS)
async def test_a_body_that_never_ends_is_given_up(site: Site) -> None:
    picker = picker_of(site)
    gateway = Gateway(picker).head(profile("prefill")).body(end=False)
    await gateway.until(1)
    assert site.loop.time() > 1000.0 + 59.0
    assert (await gateway.refusal())[0] == 408


@served(flags=FLAGS)
async def test_a_gateway_that_breaks_the_protocol_loses_its_stream(site: Site) -> None:
    picker = picker_of(site)
    broken = [
        Gateway(picker).body(),
        Gateway(picker).head(profile("prefill", "a")).head(profile("prefill", "a")),
        Gateway(picker).head(profile("prefill", "b")).body().head(profile("prefill", "b")),
        Gateway(picker).head(profile("prefill", "c")).body().body(b"more"),
        Gateway(picker).head(profile("prefill", "d")).body(end=False),
    ]
    for one in broken:
        with pytest.raises(AbortedError, match="INVALID_ARGUMENT"):
            await one.end()
    assert picker.streams == picker.bodies.used == 0
    buffered = processing_mode_pb2.ProcessingMode.BUFFERED
    code, words = await Gateway(picker).head(profile("prefill"), mode=buffered).refusal()
    assert (code, "FULL_DUPLEX_STREAMED" in words) == (500, True)
    for name in ("b", "c"):
        found = picker.choices.selector.find(name)
        assert found is not None
        found.cancel()


@served(flags=FLAGS)
async def test_an_id_in_use_is_refused_and_its_owner_goes_on(site: Site) -> None:
    picker = picker_of(site)
    first = Gateway(picker).head(profile("prefill")).body()
    await first.destination()
    assert (await Gateway(picker).head(profile("prefill")).body().refusal())[0] == 409
    await first.answer_begins().end()
    second = Gateway(picker).head(profile("decode")).body()
    await second.destination()
    assert (await Gateway(picker).head(profile("decode")).body().refusal())[0] == 409
    await second.end()
    assert len(picker.choices.selector) == 0


@served(flags=FLAGS)
async def test_a_client_that_leaves_while_its_call_is_held_leaves_nothing(site: Site) -> None:
    picker, (_, ranks) = picker_of(site), places(site)
    held = [Gateway(picker).head(profile("decode", f"h{i}")).body() for i in range(2 * len(ranks))]
    for one in held:
        await one.destination()
    waiting = Gateway(picker).head(profile("decode", "w")).body()
    await asyncio.sleep(0.1)
    waiting.task.cancel()  # As gRPC does.
    await asyncio.gather(waiting.task, return_exceptions=True)
    assert len(picker.choices.selector) == len(held)
    for one in held:
        await one.end()
    assert picker.bodies.used == 0


@served(flags=FLAGS)
async def test_a_picker_that_closes_ends_the_streams_of_begun_answers_well(site: Site) -> None:
    picker = picker_of(site)
    gateway = Gateway(picker).head(profile("decode")).body().answer_begins()
    await gateway.until(3)
    await picker.close()
    await gateway.task
    assert picker.streams == 0


@served(flags=FLAGS)
async def test_a_large_body_is_read_and_its_blocks_tell_its_length(site: Site) -> None:
    picker, prompt = picker_of(site), "word " * 60_000
    await asyncio.sleep(2.0)  # By then the ranks have told the size of a block.
    for given in ([[*range(500)]], [*range(500)]):
        gateway = Gateway(picker).head(profile("prefill"))
        gateway.body(json.dumps({"model": "tiny", "prompt": prompt}).encode())
        await gateway.destination()
        await gateway.answer_begins().end()
        kv = {"remote_block_ids": given, "do_remote_prefill": True}
        body = {"model": "tiny", "prompt": prompt, "kv_transfer_params": kv}
        gateway = Gateway(picker).head(profile("decode")).body(json.dumps(body).encode())
        await gateway.destination()
        driver = site.world.proxy.deployment.driver
        assert driver.paces is not None
        assert driver.scheduler.ledger.loads.max() == 500 * (driver.paces.block_tokens or 0) > 0
        await gateway.end()


@served(flags=FLAGS)
async def test_a_choice_that_fails_is_an_error_of_its_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    picker = picker_of(site)
    monkeypatch.setattr(picker.choices.selector, "select", lambda _: 1 // 0)
    code, words = await Gateway(picker).head(profile("prefill")).body().refusal()
    assert (code, "internal error" in words) == (500, True)
    assert picker.streams == picker.bodies.used == 0


@served(flags=FLAGS)
async def test_a_failed_prefill_frees_its_prefiller(site: Site) -> None:
    picker = picker_of(site)
    gateway = Gateway(picker).head(profile("prefill")).body()
    await gateway.destination()
    await gateway.answer_begins(502).end()
    assert len(picker.choices.selector) == 0
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR


@served(flags={**FLAGS, "first_token_timeout_s": 5})
async def test_a_prefill_whose_decode_call_never_comes_is_forgotten(site: Site) -> None:
    picker = picker_of(site)
    await prefilled(picker)
    await asyncio.sleep(4.0)
    assert len(picker.choices.selector) == 1
    await asyncio.sleep(2.0)
    assert len(picker.choices.selector) == 0
    code, words = await Gateway(picker).head(profile("decode")).body().refusal()
    assert (code, "nobody asked" in words) == (503, True)


@served(flags=FLAGS)
async def test_a_coordinators_own_members_are_taken(site: Site) -> None:
    """KV parameters are its business, and so are those of the native interface."""
    picker = picker_of(site)
    ids = {"token_ids": [1, 2, 3, 4], "model": "tiny", "sampling_params": {"max_tokens": 1}}
    ids["sampling_params"]["extra_args"] = {"kv_transfer_params": {"do_remote_decode": True}}  # type: ignore[index]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2}
    more: dict[str, Any] = {"kv_transfer_params": {}, "vllm_xargs": {"kv_transfer_params": {}}}
    for path, values in (("/inference/v1/generate", ids), ("/v1/chat/completions", chat | more)):
        body = json.dumps(values).encode()
        gateway = Gateway(picker).head(profile("prefill"), path=path).body(body)
        assert await gateway.destination() in places(site)[0]
        await gateway.answer_begins(500).end()
    held = site.world.proxy.deployment.driver.scheduler.prefillers.held_tokens
    assert not any(held)


def test_another_router_shares_the_books(tmp_path: Path) -> None:
    """A gateway and a router that asks over HTTP have one process: no rank gets more than it may."""

    async def asks(site: Site, path: str, values: object, method: str = "POST") -> None:
        service = site.world.proxy.select_service
        assert service is not None
        key = [(b"authorization", b"Bearer a-key")]
        port = service.server.port
        answer = await site.send(path, values, method=method, headers=key, port=port).end()
        assert answer.status == 200, answer.body

    async def scenario(site: Site) -> None:
        picker, (_, ranks) = picker_of(site), places(site)
        books = site.world.proxy.deployment.driver.scheduler
        held = []
        for i in range(len(ranks)):  # Ids are each caller's own.
            await prefilled(picker, f"r{i}")
            held.append(Gateway(picker).head(profile("decode", f"r{i}")).body())
            await held[-1].destination()
            await asks(site, "/select_and_reserve", {"selection_id": f"r{i}", "isl_tokens": 9})
            await asks(site, f"/reservations/r{i}/prefill_complete", b"")
        assert [*books.ledger.bound] == [2] * len(ranks)
        await prefilled(picker, "last")
        last = Gateway(picker).head(profile("decode", "last")).body()
        await asyncio.sleep(5.0)
        assert not last.answers
        await asks(site, "/reservations/r0", b"", "DELETE")
        assert await last.destination() in ranks
        for one in (*held, last):
            await one.answer_begins().end()
        for i in range(1, len(ranks)):
            await asks(site, f"/reservations/r{i}", b"", "DELETE")
        assert not books.ledger.bound.sum()
        assert not sum(books.prefillers.prefills)

    select = {"select_key_file": secret_file(tmp_path, "keys", "a-key\n"), "select_port": 0}
    play(scenario, flags={**FLAGS, **select, "scrape_interval_s": 1000})


def test_a_process_serves_the_protocol_and_its_health(tmp_path: Path) -> None:
    """Over gRPC, with a port of its own; a picker that is on needs a port. Other routers ask beside it."""
    keys = secret_file(tmp_path, "keys", "a-key\n")

    async def main() -> None:
        async with engines() as fleet:
            urls = [f"http://127.0.0.1:{one.port}" for one in fleet.engines]
            split = ENGINES.prefillers
            port, beside = _free_port(), _free_port()
            words: tuple[str, ...] = ("--pick", "coordinator", "--pick-port", str(port))
            words = (*words, "--select-key-file", keys, "--select-port", str(beside))
            async with (
                serving(urls[:split], urls[split:], *words),
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            ):
                await _speaks(channel, urls)
                key = [(b"authorization", b"Bearer a-key")]
                loads = await Client(beside).send(b"GET", "/loads", headers=key).end()
                assert loads.status == 200

    play_in_real_time(main, patience_s=2 * PATIENCE_S)


async def _speaks(channel: Any, urls: list[str]) -> None:
    process = channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )
    call = process()
    fields = [
        base_pb2.HeaderValue(key=key, raw_value=value)
        for key, value in ((":path", b"/v1/completions"), (":method", b"POST"))
    ]
    headers = pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=fields))
    await call.write(pb.ProcessingRequest(request_headers=headers))
    await call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=True)))
    answer = await call.read()
    assert told(answer)[KEY].split(",")[0] in {url.rpartition("/")[2] for url in urls}
    call.cancel()
    words = {
        "request_serializer": wrappers_pb2.StringValue.SerializeToString,
        "response_deserializer": wrappers_pb2.Int32Value.FromString,
    }
    check = channel.unary_unary("/grpc.health.v1.Health/Check", **words)
    for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert (await check(wrappers_pb2.StringValue(value=name))).value == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(wrappers_pb2.StringValue(value="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **words)
    states = watch(wrappers_pb2.StringValue(value="readiness"))
    assert (await states.read()).value == 1
    states.cancel()


def _free_port() -> int:
    with create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port
