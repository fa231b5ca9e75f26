"""What the engines serve: read in the background, shown by model, and used to refuse what cannot fit."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.extended import usually
from tests.support.site import Handler, Site, answering, served

from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.engines.model_list import ModelsPageError, parse_models
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "t1"}]}
JSON = [(b"content-type", b"application/json")]


def page(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def lists(cards: dict[str, dict[str, Any]]) -> Handler:
    """Return an engine's route that lists one model; an engine that is not named knows no length."""

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        reply.send(200, JSON, page(cards.get(engine, {"id": "tiny"})))

    return answer


async def known(site: Site) -> None:
    """Wait until the proxy has read the lists of all engines."""
    await asyncio.sleep(2.0)
    assert site.seen == []


def test_adapters_have_the_context_of_their_base_model() -> None:
    base = {"id": "base", "max_model_len": 100, "parent": None}
    adapter = {"id": "org/adapter", "parent": "base", "max_model_len": None}
    orphan = {"id": "orphan", "parent": "gone"}
    models = parse_models(page(base, adapter, orphan))
    assert [(one.name, one.parent, one.max_model_len) for one in models] == [
        ("base", None, 100),
        ("org/adapter", "base", 100),
        ("orphan", "gone", None),
    ]
    assert models[1].card == adapter


@pytest.mark.parametrize(
    "card",
    [
        b'{"id":"tiny","max_model_len":%d}' % 2**64,
        b'{"id":"tiny","max_model_len":-1}',
    ],
    ids=["beyond all messages", "negative"],
)
@served(ranks=2)
async def test_an_engines_odd_model_stops_nothing(site: Site, card: bytes) -> None:
    site.rank_handlers[b"/v1/models"] = answering(200, b'{"data":[%b]}' % card)
    await asyncio.sleep(70.0)  # The lists are read again.
    assert (await site.post(CHAT, TALK | {"max_tokens": 4})).status == 200
    site.fleet.kill("decode/0")
    await asyncio.sleep(30.0)
    assert (await site.admin("/admin/instances")).status == 200
    told = (await site.get("/v1/models")).json["data"]
    assert [one["id"] for one in told] == ["tiny"]
    assert (await site.post(CHAT, TALK | {"max_tokens": 4})).status == 200


@pytest.mark.parametrize("levels", usually([500, 935, 950, 965, 977], [500, *range(920, 980, 3)]))
@served(ranks=2)
async def test_a_card_that_could_be_read_and_not_written_is_not_shown(
    site: Site, levels: int
) -> None:
    card = b'{"id":"tiny","more":%b}' % (b"[" * levels + b"]" * levels)

    site.handlers[b"/v1/models"] = answering(200, b'{"data":[%b]}' % card)
    await asyncio.sleep(70.0)  # The lists are read again.
    assert (await site.get("/v1/models")).status == 200
    assert (await site.get("/v1/models/tiny")).status in (200, 404)
    site.fleet.kill("decode/0")
    await asyncio.sleep(30.0)
    assert (await site.post(CHAT, TALK | {"max_tokens": 4})).status == 200


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data":{}}',
        b'{"data":[1]}',
        b'{"data":[{}]}',
        b'{"data":[{"id":1}]}',
        b"[" * 10_000,
        b'{"data":[{"id":"x","more":%b}]}' % (b"[" * 100 + b"]" * 100),
        page(*({"id": "x"} for _ in range(10_001))),
    ],
)
def test_a_page_of_another_shape_tells_nothing(bad: bytes) -> None:
    with pytest.raises(ModelsPageError):
        parse_models(bad)


@pytest.mark.parametrize("length", [0, -1, True, "100", 1.5])
def test_a_context_that_is_no_length_is_not_known(length: object) -> None:
    (model,) = parse_models(page({"id": "x", "max_model_len": length}))
    assert model.max_model_len is None


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (CHAT, TALK | {"max_tokens": 4097}),
        (CHAT, TALK | {"max_completion_tokens": 5000, "max_tokens": 1}),
        (CHAT, TALK | {"max_tokens": 10**30, "stream": True}),
        (COMPLETIONS, {"model": "tiny", "prompt": "t1", "max_tokens": 4097}),
        (COMPLETIONS, {"prompt": "t1", "max_tokens": 4097}),
    ],
)
@served()
async def test_an_answer_beyond_the_context_is_refused_before_a_prefill(
    site: Site, path: str, values: dict[str, object]
) -> None:
    """The decode rank found it out, with the KV cache on a prefiller for its lease."""
    await known(site)
    refused = await site.post(path, values)
    assert refused.status == 400
    assert site.seen == []
    (record,) = site.world.ended
    assert (record.outcome, record.status) == (Outcome.CLIENT_ERROR, 400)
    # In the engine's own words.
    own = await site.ask("decode/0", path, values)
    assert (own.status, own.json) == (400, refused.json)


@pytest.mark.parametrize("length", [4097, 5000])
@served()
async def test_a_prompt_of_ids_beyond_the_context_is_refused_before_a_prefill(
    site: Site, length: int
) -> None:
    await known(site)
    body = {"model": "tiny", "prompt": [5] * length, "max_tokens": 1}
    refused = await site.post(COMPLETIONS, body)
    assert refused.status == 400
    least = "at least " if length == 4097 else ""
    assert f"contains {least}{length} input tokens" in refused.json["error"]["message"]
    assert refused.json["error"]["param"] == "input_tokens"
    assert site.seen == []


IDS = {"model": "tiny", "prompt": [5] * 90, "max_tokens": 4007}


@pytest.mark.parametrize(
    "more",
    [{}, {"stream": True}, {"max_tokens": "4007"}, {"max_tokens": 4096}, {"prompt": [5] * 4096}],
)
@served()
async def test_ids_that_leave_no_room_for_the_answer_are_refused_before_a_prefill(
    site: Site, more: dict[str, object]
) -> None:
    await known(site)
    values = IDS | more
    refused = await site.post(COMPLETIONS, values)
    assert refused.status == 400
    error = refused.json["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "BadRequestError",
        "input_tokens",
        400,
    )
    assert site.seen == []
    (record,) = await site.ended()
    assert (record.outcome, record.status) == (Outcome.CLIENT_ERROR, 400)
    # In the engine's own words, which reads no further than it has to.
    own = await site.ask("decode/0", COMPLETIONS, values)
    if values["max_tokens"] == 4007 and len(values["prompt"]) == 90:  # type: ignore[arg-type]
        assert own.json == refused.json
    assert own.status == 400
    # One token less has room.
    fits = await site.post(COMPLETIONS, IDS | {"max_tokens": 4006, "stop_token_ids": [*range(200)]})
    assert fits.status == 200


TALKS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "t1 t2 t3"},
    CHAT: TALK,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token", ["decode", "prefill"])
@pytest.mark.parametrize("path", TALKS)
@served(flags=lambda first_token: {"first_token": first_token})
async def test_a_text_that_leaves_no_room_for_the_answer_reaches_no_rank(
    site: Site, path: str, stream: bool, first_token: str
) -> None:
    await known(site)
    refused = await site.post(path, TALKS[path] | {"max_tokens": 4095, "stream": stream})
    assert refused.status == 400
    error = refused.json["error"]
    assert error["param"] == "input_tokens"
    assert "you requested 4095 output tokens" in error["message"]
    assert [seen.engine[:7] for seen in site.seen] == ["prefill"]
    (record,) = await site.ended()
    assert (record.outcome, record.status, record.rank) == (Outcome.CLIENT_ERROR, 400, "")
    assert record.prompt_tokens + 4095 > 4096
    own = await site.ask("decode/0", path, TALKS[path] | {"max_tokens": 4095, "stream": stream})
    assert own.json == refused.json
    assert record.retries == 0


PARTS = [{"type": "text", "text": "t1"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {"truncate_prompt_tokens": 9}),
        (COMPLETIONS, {"max_tokens": None}),
        (CHAT, {"max_completion_tokens": 4, "max_tokens": 4095}),
        (CHAT, {"messages": [{"role": "user", "content": PARTS}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio_embeds"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": {"text": "t1"}}]}),
    ],
)
@served()
async def test_what_a_rank_might_serve_is_asked_of_it(
    site: Site, path: str, more: dict[str, object]
) -> None:
    await known(site)
    ranks = []

    def rank(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        ranks.append(engine)
        reply.send(418, [], b"")

    def prefiller(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        said = {"index": 0, "finish_reason": "length", "text": "a", "message": {"content": "a"}}
        kv = {"do_remote_prefill": True, "remote_block_ids": [], "remote_engine_id": "a"}
        kv |= {"remote_host": "a", "remote_port": 1}
        answer = {"choices": [said], "usage": {"prompt_tokens": 90}, "kv_transfer_params": kv}
        reply.send(200, [], json.dumps(answer).encode())

    site.handlers[path.encode()] = prefiller
    site.rank_handlers[path.encode()] = rank
    body = TALKS[path] | {"max_tokens": 4095} | more
    assert (await site.post(path, body)).status == 418
    assert len(ranks) == 1


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (CHAT, TALK | {"max_tokens": 4096}),
        (CHAT, TALK | {"max_completion_tokens": 5, "max_tokens": 5000}),
        (COMPLETIONS, {"model": "tiny", "prompt": "t1", "max_completion_tokens": 5000}),
        (COMPLETIONS, {"model": "another", "prompt": "t1", "max_tokens": 5000}),
        (
            COMPLETIONS,
            {"model": "tiny", "prompt": [5] * 4097, "truncate_prompt_tokens": 9, "max_tokens": 1},
        ),
        (COMPLETIONS, {"model": "tiny", "prompt": [[5] * 4097, [5]], "max_tokens": 1}),
    ],
)
@served()
async def test_what_is_not_certain_is_for_the_engines(
    site: Site, path: str, values: dict[str, object]
) -> None:
    await known(site)
    await site.post(path, values)
    assert site.seen


@pytest.mark.parametrize(
    "cards",
    [
        {"decode/1": {"id": "tiny", "max_model_len": 8192}},
        {"prefill/0": {"id": "tiny", "max_model_len": 100}},
        {"prefill/0": {}},
    ],
)
@served()
async def test_nothing_is_refused_while_one_engine_may_have_a_longer_context(
    site: Site, cards: dict[str, dict[str, Any]]
) -> None:
    site.handlers[b"/v1/models"] = lists(cards)
    await known(site)
    await site.post(CHAT, TALK | {"max_tokens": 5000})
    assert site.seen


@served()
async def test_an_engine_that_comes_back_is_asked_again(site: Site) -> None:
    names = ("prefill/0", "prefill/1", "decode/0", "decode/1")
    cards: dict[str, dict[str, Any]] = {n: {"id": "tiny", "max_model_len": 100} for n in names}
    proxy = site.world.proxy
    site.handlers[b"/v1/models"] = lists(cards)
    cards["decode/1"]["max_model_len"] = 150
    await known(site)
    assert proxy.deployment.models.max_model_len("tiny") == 150
    rank = proxy.deployment.instances.ranks[1]
    rank.status = Status.QUARANTINED
    await asyncio.sleep(2.0)
    assert proxy.deployment.models.max_model_len("tiny") == 100
    cards["decode/1"]["max_model_len"] = 200
    rank.status = Status.UP
    await asyncio.sleep(2.0)
    assert proxy.deployment.models.max_model_len("tiny") == 200
    # And each of them now and then, while adapters come and go.
    cards["decode/0"]["max_model_len"] = 300
    await asyncio.sleep(62.0)
    assert proxy.deployment.models.max_model_len("tiny") == 300
    assert proxy.deployment.models.max_model_len("") == 300
    assert proxy.deployment.models.max_model_len("another") is None


@pytest.mark.parametrize("path", ["org/m%C3%B6del", "org%2Fm%C3%B6del"])
@served()
async def test_one_model_is_shown(site: Site, path: str) -> None:
    """`models.retrieve` of OpenAI's clients got a 404."""
    card = {"id": "org/mödel", "object": "model", "max_model_len": 100}
    site.handlers[b"/v1/models"] = lists({"decode/0": card})
    await known(site)
    answer = await site.get(f"/v1/models/{path}")
    assert (answer.status, answer.json) == (200, card)
    assert answer.header(b"x-request-id")
    assert (await site.send(f"/v1/models/{path}", method="HEAD").end()).status == 200
    missing = await site.get("/v1/models/gone")
    assert missing.status == 404
    assert missing.json["error"]["message"] == "The model `gone` does not exist."
    assert site.world.ended[-1].status == 404
