"""Answers that are lost late: after the request was taken for decoding, or after its last token."""

from typing import TYPE_CHECKING

import pytest

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Request

pytestmark = pytest.mark.parametrize("relays", [0, 2], ids=["one process", "two relays"])

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "faults",
    [{"reset_after_tokens": 50}, {"stall_after_tokens": 50}],
    ids=lambda one: next(iter(one)),
)
def test_a_whole_answer_that_its_rank_loses_is_prefilled_and_decoded_elsewhere(
    play: "Play", faults: dict[str, int]
) -> None:
    async def scenario(site: "Site") -> None:
        values = {"messages": [], "max_tokens": 100, "ignore_eos": True}
        right = await site.ask("prefill/0", CHAT, values)
        site.fleet.faults.set("decode/0", **faults)
        exchange = await site.post(CHAT, values)
        assert exchange.status == 200
        assert exchange.text == right.text
        # By then the rank was thought to have the KV cache, so that the prefiller's is not trusted.
        assert len(site.received("prefill", CHAT)) == 3
        assert [one.engine for one in site.received("decode", CHAT)] == ["decode/0", "decode/1"]
        (record,) = await site.ended()
        assert (record.retries, record.output_tokens) == (1, 100)

    play(scenario, flags={"answer_timeout_s": 4.0})


def test_the_tokens_of_an_answer_count_if_the_client_leaves_before_its_very_end(
    play: "Play",
) -> None:
    def answer(engine: str, request: "Request", reply: "Reply") -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
        reply.write(b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n')

    async def scenario(site: "Site") -> None:
        site.handlers[b"/v1/completions"] = answer
        # Decoded without a prefill, and with a last event that waits for nothing.
        values = {"prompt": "a", "echo": True, "stream": True}
        values |= {"stream_options": {"include_usage": True}}
        exchange = site.send("/v1/completions", values)
        await exchange.until_events(2)
        exchange.call.abort()
        (record,) = await site.ended()
        assert (record.outcome, record.output_tokens) == (Outcome.OK, 2)

    play(scenario)
