"""A KV cache that a rank may have pulled is offered to no other rank.

The engines here do as vLLM does with NIXL: a pull frees the prefiller's blocks, and who pulls them
again gets whatever is there by then, with status 200.
"""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Site, served

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def choice(text: str, finish_reason: str) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}


class Engines:
    """Prefillers that hand out blocks, and decode ranks that pull them."""

    def __init__(self, failing: str) -> None:
        self.failing = failing  # How the first decode leg ends: "reset", "500" or "event".
        self.pulls: list[int] = []  # The blocks that were pulled, in order.
        self._blocks = 0

    def answer(self, engine: str, request: "HttpRequest", reply: "Reply") -> None:
        values = json.loads(request.body)
        if engine.startswith("prefill"):
            self._prefill(reply)
        else:
            self._decode(values, reply)

    def _prefill(self, reply: "Reply") -> None:
        self._blocks += 1
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[self._blocks]],
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }
        answer = {"choices": [choice("a", "length")], "usage": USAGE, "kv_transfer_params": params}
        reply.send(200, JSON, json.dumps(answer).encode())

    def _decode(self, values: dict[str, Any], reply: "Reply") -> None:
        ((block,),) = values["kv_transfer_params"]["remote_block_ids"]
        text = "another prompt's" if block in self.pulls else "mine"
        self.pulls.append(block)
        if len(self.pulls) == 1:
            self._fail(reply)
        elif values.get("stream"):
            event = {"object": "text_completion", "choices": [choice(text, "stop")]}
            reply.start(200, STREAM)
            reply.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(event).encode())
            reply.end()
        else:
            answer = {"choices": [choice(text, "stop")], "usage": USAGE}
            reply.send(200, JSON, json.dumps(answer).encode())

    def _fail(self, reply: "Reply") -> None:
        error = b'{"error": {"message": "broken", "type": "InternalServerError", "code": 500}}'
        if self.failing == "reset":
            reply.abort()
        elif self.failing == "500":
            reply.send(500, JSON, error)
        else:
            reply.start(200, STREAM)
            reply.write(b"data: %s\n\ndata: [DONE]\n\n" % error)
            reply.end()


@pytest.mark.parametrize(
    ("failing", "stream"),
    [("reset", False), ("reset", True), ("500", False), ("500", True), ("event", True)],
)
@served()
async def test_what_a_rank_may_have_pulled_is_prefilled_again(
    site: Site, failing: str, *, stream: bool
) -> None:
    """The same lease went to a second rank, which answered another prompt with 200."""
    engines = Engines(failing)
    site.handlers[COMPLETIONS.encode()] = engines.answer
    values = {"prompt": "t1 t2 t3", "max_tokens": 8, "stream": stream}
    exchange = await site.post(COMPLETIONS, values)
    assert exchange.status == 200
    assert exchange.text == "mine"
    assert engines.pulls == [1, 2]
    if failing == "reset":  # A rank that answers may be tried with another prefiller.
        assert len({one.engine for one in site.received("decode", COMPLETIONS)}) == 2
    (record,) = await site.ended()
    assert record.retries == 1


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_what_no_rank_took_is_offered_to_another(site: Site, *, stream: bool) -> None:
    site.fleet.kill("decode/0")
    values = {"prompt": "t1 t2 t3", "max_tokens": 8, "ignore_eos": True, "stream": stream}
    exchange = await site.post(COMPLETIONS, values)
    assert exchange.status == 200
    assert len(site.received("prefill", COMPLETIONS)) == 1
    assert len(site.received("decode", COMPLETIONS)) == 1


@served()
async def test_a_kv_cache_is_not_trusted_after_its_rank_was_removed(site: Site) -> None:
    """A rank that is removed by force may have pulled what it was offered."""
    site.fleet.faults.set("decode/0", hang=True)
    site.fleet.faults.set("decode/1", hang=True)
    values = {"prompt": "t1 t2 t3", "max_tokens": 8, "ignore_eos": True, "stream": True}
    exchange = site.send(COMPLETIONS, values)
    await site.until(lambda: bool(site.received("decode", COMPLETIONS)))
    (taken,) = site.received("decode", COMPLETIONS)
    site.fleet.faults.clear("decode/0")
    site.fleet.faults.clear("decode/1")
    order = {"role": "decode", "url": site.fleet.engine(taken.engine).url, "force": True}
    assert (await site.admin("/admin/instances/remove", order)).status == 200
    assert (await exchange.end()).done
    assert len(site.received("prefill", COMPLETIONS)) == 2
