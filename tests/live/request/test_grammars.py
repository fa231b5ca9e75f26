"""Requests bound to a grammar: their prefill legs may end before a token, and what the answer is then."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 4,
    "structured_outputs": {"regex": ""},
}
KV = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("connector", "believed"), [("nixl", True), ("mooncake", False), ("mooncake-ascend", False)]
)
@served("connector")
async def test_an_answer_that_ends_before_a_token_is_one_where_the_prompt_was_whole(
    site: Site, connector: str, believed: bool, stream: bool
) -> None:
    """NIXL tells of a prompt that was not computed to its end; with the others a rank says it all."""
    wanted: list[object] = []

    def ends(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        if "kv_transfer_params" not in json.loads(request.body):
            computes(engine, request, reply)  # A prefiller does the whole request.
            return
        wanted.append(json.loads(request.body)["min_tokens"])
        said = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": None}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        answer = {"id": "p", "choices": [said], "usage": usage, "kv_transfer_params": KV}
        reply.send(200, [(b"content-type", b"application/json")], json.dumps(answer).encode())

    def computes(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine
        assert "kv_transfer_params" not in json.loads(request.body)
        choice = {"index": 0, "text": "rank", "finish_reason": "stop"}
        if not stream:
            answer = {"id": "d", "choices": [choice], "usage": {}}
            reply.send(200, [], json.dumps(answer).encode())
            return
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b"data: %b\n\n" % json.dumps({"id": "d", "choices": [choice]}).encode())
        reply.write(b"data: [DONE]\n\n")
        reply.end()

    site.handlers[COMPLETIONS.encode()] = ends
    site.rank_handlers[COMPLETIONS.encode()] = computes
    answer = await site.post(COMPLETIONS, BODY | {"stream": stream})
    assert (answer.status, answer.text) == (200, "" if believed else "rank")
    assert wanted == [0]
    (record,) = await site.ended()
    assert (record.outcome, record.retries) == (Outcome.OK, 0)


CHAT = "/v1/chat/completions"
TOKENS = "/inference/v1/generate"
BOUND: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"response_format": {"type": "json_object"}}],
    COMPLETIONS: [{"structured_outputs": {"regex": ".*"}}, {"guided_json": {}}],
    TOKENS: [{"structured_outputs": {"regex": ".*"}}],
}
WAYS = [
    ("nixl", {}),
    ("nixl", {"first_token": "prefill", "direct": "refuse"}),
    ("mooncake", {}),
    ("mooncake-ascend", {"first_token": "prefill"}),
    ("mooncake-layerwise", {}),
]


def bound_request(path: str, number: int, *, stream: bool) -> dict[str, Any]:
    """Return a request whose first token ends its answer as often as not."""
    bound = BOUND[path][number % len(BOUND[path])]
    ends = {"max_tokens": 6, "stop_token_ids": [*range(0, 16_384, 3)]}
    values: dict[str, Any] = {"model": "tiny", "stream": stream}
    if path == TOKENS:
        return values | {"token_ids": [number, 2, 3], "sampling_params": ends | bound}
    text = f"canary {number}"
    prompt = {"messages": [{"role": "user", "content": text}], "prompt": text}
    del prompt["prompt" if path == CHAT else "messages"]
    return values | prompt | ends | bound | {"stop": ["1"]}


def said(answer: Exchanged) -> list[object]:
    messages = answer.chunks if answer.events else [answer.json]
    choices = [choice for message in messages for choice in message["choices"]]
    ids = [one for choice in choices for one in choice.get("token_ids") or ()]
    return [answer.text, ids, choices[-1]["finish_reason"], choices[-1].get("stop_reason")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("connector", "flags"), WAYS)
@served("connector", "flags", mean_output_tokens=2.0)
async def test_where_a_sampled_answer_ends_is_for_the_rank_to_say(
    site: Site, connector: str, flags: dict[str, object], stream: bool
) -> None:
    """Without a seed a prefiller draws another first token: one that ends an answer counts for nothing."""
    lengths = []
    for path in BOUND:
        for number in range(8):
            values = bound_request(path, number, stream=stream)
            answer = await site.post(path, values)
            alone = await site.ask("decode/0", path, values)
            assert answer.status == 200
            assert said(answer) == said(alone)
            lengths.append(len(answer.text) if path != TOKENS else len(str(said(answer)[1])))
    records = await site.ended(len(lengths))
    assert {record.outcome for record in records} == {Outcome.OK}
    assert all(record.rank and record.retries == 0 for record in records)
    # Each rank got the KV cache of its prompt, whether its own first token was the end or not.
    ranks = [seen.values for seen in site.received("decode")]
    assert sum("kv_transfer_params" in values for values in ranks) == len(lengths)
    assert len(set(lengths)) > 2
