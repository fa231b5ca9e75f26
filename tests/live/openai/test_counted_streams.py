"""Engines that put several tokens into an event, or none: what the proxy makes of their streams."""

import json
from collections.abc import Mapping

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED = {"include_usage": True, "continuous_usage_stats": True}
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def options_sent(site: Site) -> list[object]:
    """Return the `stream_options` of the decode legs."""
    return [json.loads(seen.request.body).get("stream_options") for seen in site.received("decode")]


@pytest.mark.parametrize(("count", "exact"), [("usage", True), ("events", False)])
@pytest.mark.parametrize("odd", [{"merged_outputs": 0.3}, {"partial_utf8": 0.3}], ids=str)
@served("**odd", flags=lambda count: {"count_tokens": count}, ranks=1)
async def test_the_tokens_of_a_stream_that_is_left(
    site: Site, count: str, odd: Mapping[str, float], *, exact: bool
) -> None:
    exchange = site.send(CHAT, LONG | {"messages": []})
    await exchange.until_events(100)
    emitted = site.fleet.stats()["output_tokens"]
    exchange.call.abort()
    await site.until(lambda: bool(site.world.ended))
    (record,) = site.world.ended
    assert record.outcome is Outcome.CANCELLED
    # A token may be on its way, or held for the next.
    assert (record.output_tokens >= emitted - 4) is exact


@served(ranks=1, reasoning_parser=True)
async def test_a_rank_with_a_reasoning_parser_is_asked_once(site: Site) -> None:
    values = {"messages": [], "max_tokens": 5, "stream": True}
    for _ in range(3):
        assert b"usage" not in (await site.post(CHAT, values)).body
    total = ASKED | {"continuous_usage_stats": False}
    assert options_sent(site) == [ASKED, total, total]


@served(ranks=1, reasoning_parser=True)
async def test_completions_cost_no_engine_its_reasoning(site: Site) -> None:
    values = {"prompt": "a", "max_tokens": 5, "stream": True}
    for _ in range(2):
        assert b"usage" not in (await site.post(COMPLETIONS, values)).body
    assert options_sent(site) == [ASKED, ASKED]


@served()
async def test_an_answer_that_is_not_streamed_asks_for_nothing(site: Site) -> None:
    await site.post(CHAT, {"messages": [], "max_tokens": 5})
    assert options_sent(site) == [None]
