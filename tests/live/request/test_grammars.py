"""Requests bound to a grammar: their prefill legs may end before a token, and what the answer is then."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Request

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


@pytest.mark.parametrize("relays", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("connector", "believed"), [("nixl", True), ("mooncake", False), ("mooncake-ascend", False)]
)
def test_an_answer_that_ends_before_a_token_is_one_where_the_prompt_was_whole(
    play: "Play", connector: str, believed: bool, stream: bool, relays: int
) -> None:
    """NIXL tells of a prompt that was not computed to its end; with the others a rank says it all."""

    async def scenario(site: "Site") -> None:
        wanted: list[object] = []

        def ends(engine: str, request: "Request", reply: "Reply") -> None:
            if "kv_transfer_params" not in json.loads(request.body):
                computes(engine, request, reply)  # A prefiller does the whole request.
                return
            wanted.append(json.loads(request.body)["min_tokens"])
            said = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": None}
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            answer = {"id": "p", "choices": [said], "usage": usage, "kv_transfer_params": KV}
            reply.send(200, [(b"content-type", b"application/json")], json.dumps(answer).encode())

        def computes(engine: str, request: "Request", reply: "Reply") -> None:
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

    play(scenario, connector=connector, relays=relays)
