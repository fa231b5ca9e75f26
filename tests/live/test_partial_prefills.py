"""Prefillers that leave the end of a prompt to the rank, as vLLM's do for hybrid models.

What they say follows a shorter prompt, so it is not the first token of the answer.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_early_tokens import EARLY, SAID, say
from tests.live.test_proxy_connectors import PULL_KEYS
from tests.support.played import played_by
from tests.support.site import Site, play

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest


COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2],
    "max_tokens": 20,
    "temperature": 0,
    "stream": True,
}


def play_with(
    scenario: Any,
    *,
    finish: str = "length",
    computed: int | None,
    says: str = "bc",
    told: Mapping[str, Any] = {},
    **changes: Any,
) -> None:
    """Play before prefillers that say "a" and tell what is `told`, and ranks that say two letters."""

    async def main(site: Site) -> None:
        def prefill(engine: str, request: "HttpRequest", reply: "Reply") -> None:
            del engine, request
            kv: dict[str, Any] = dict.fromkeys(PULL_KEYS, "k")
            kv |= {"do_remote_prefill": True, "remote_port": 1, "remote_block_ids": [1]}
            kv |= told
            if computed is not None:
                kv["remote_num_tokens"] = computed
            choice = SAID | {"finish_reason": finish}
            done = {"choices": [choice], "usage": {"prompt_tokens": 2}, "kv_transfer_params": kv}
            reply.send(200, [(b"content-type", b"application/json")], json.dumps(done).encode())

        def decode(engine: str, request: "HttpRequest", reply: "Reply") -> None:
            del engine, request
            say(reply, *says, finish="stop")

        site.handlers[COMPLETIONS.encode()] = prefill
        site.rank_handlers[COMPLETIONS.encode()] = decode
        await scenario(site)

    play(main, flags=EARLY | {"direct": "decode"}, **changes)


played = played_by(play_with)


@pytest.mark.parametrize("finish", ["length", "stop"])
@played("finish", computed=1)
async def test_the_first_token_of_a_shorter_prompt_is_not_the_clients(
    site: Site, finish: str
) -> None:
    for number in (1, 2, 3):
        exchange = await site.post(COMPLETIONS, ASKED)
        assert (exchange.done, exchange.text) == (True, "bc")
        record = (await site.ended(number))[-1]
        assert (record.outcome, record.early_first_token) == (Outcome.OK, False)
        assert (record.first_token_differences, record.retries) == (0, 0)
    legs = [leg.values for leg in site.received("prefill", COMPLETIONS)]
    # Two prefillers were asked what only the first token of an answer needs, once each.
    assert sorted("return_token_ids" in leg for leg in legs) == [False, True, True]


@played(computed=2)
async def test_one_that_computes_whole_prompts_is_trusted(site: Site) -> None:
    exchange = await site.post(COMPLETIONS, ASKED)
    assert exchange.text == "abc"
    (record,) = await site.ended()
    assert (record.early_first_token, record.first_token_differences) == (True, 1)


@played(finish="stop", computed=None, connector="mooncake-ascend")
async def test_where_nothing_is_told_an_answer_that_ends_at_once_is_another_engines(
    site: Site,
) -> None:
    exchange = await site.post(COMPLETIONS, ASKED)
    assert (exchange.done, exchange.text) == (True, "bc")
    (leg,) = site.received("decode", COMPLETIONS)
    assert "kv_transfer_params" not in leg.values
    (record,) = await site.ended()
    assert (record.outcome, record.early_first_token) == (Outcome.OK, False)


@played(computed=None, connector="mooncake-ascend")
async def test_where_nothing_is_told_ever_differing_tokens_are_never_given(site: Site) -> None:
    for number in range(1, 61):
        exchange = await site.post(COMPLETIONS, ASKED)
        assert (exchange.done, exchange.text) == (True, "bc")
        record = (await site.ended(number))[-1]
        assert (record.early_first_token, record.first_token_differences) == (False, 0)
    # They are not asked for any more, either.
    assert "return_token_ids" not in site.received("prefill", COMPLETIONS)[-1].values


def test_where_nothing_is_told_trust_follows_agreement_and_ends_with_the_process() -> None:
    engine = {"remote_engine_id": "first"}

    async def scenario(site: Site) -> None:
        early: list[bool] = []

        async def ask(times: int) -> list[bool]:
            for _ in range(times):
                exchange = await site.post(COMPLETIONS, ASKED)
                assert (exchange.done, exchange.text) == (True, "ac")
                record = (await site.ended(len(early) + 1))[-1]
                assert (record.outcome, record.retries) == (Outcome.OK, 0)
                early.append(record.early_first_token)
            return early[-times:]

        # It is learnt of both prefillers.
        assert not any(await ask(16))
        assert any(await ask(16 * 2))
        engine["remote_engine_id"] = "second"
        assert not any(await ask(16))

    play_with(scenario, computed=None, says="ac", told=engine, connector="mooncake-ascend")
