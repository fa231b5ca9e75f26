"""Blocks that are pulled although they are not the prompt's: the wrong text, and nothing says so."""

import asyncio
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, Lab, emulated

from balanceroute.proxy.lab.emulate.leases import LeaseEnd

VALUES: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 5,
    "ignore_eos": True,
}
OTHER = VALUES | {"prompt": "t7 t8 t9 t10"}
PULLING = ["nixl", "mooncake-ascend"]
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


async def texts(lab: Lab, *bodies: dict[str, Any]) -> list[str]:
    """Return the right answers."""
    return [(await lab.post("decode/0", COMPLETIONS, body)).text() for body in bodies]


@STREAMED
@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_lease_pulled_twice_is_answered_with_the_text_of_another_prompt(
    lab: Lab, connector: str, streamed: bool
) -> None:
    right, others = await texts(lab, VALUES, OTHER)
    leg = await lab.prefilled(COMPLETIONS, VALUES) | {"stream": streamed}
    assert (await lab.post("decode/0", COMPLETIONS, leg)).text() == right
    await lab.prefilled(COMPLETIONS, OTHER)  # Its blocks are those that were freed.
    again = await lab.post("decode/1", COMPLETIONS, leg, {"X-Request-Id": "again"})
    assert (again.status, again.text()) == (200, others)
    assert [(one.request_id, one.end) for one in lab.fleet.misreads] == [
        ("cmpl-again", LeaseEnd.PULLED)
    ]
    assert lab.fleet.stats()["misreads"] == lab.fleet.stats()["misses"]["pulled"] == 1
    lab.fleet.reset_stats()
    assert lab.fleet.stats()["misreads"] == 0


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_misread_is_never_right_by_chance(lab: Lab, connector: str) -> None:
    (right,) = await texts(lab, VALUES)
    for _ in range(3):  # The prefiller computes nothing but this prompt.
        leg = await lab.prefilled(COMPLETIONS, VALUES)
        await lab.post("decode/0", COMPLETIONS, leg)
        again = await lab.post("decode/0", COMPLETIONS, leg)
        assert again.status == 200
        assert again.text() != right
        assert again.json["usage"]["prompt_tokens"] == 3  # Of the request's own prompt.


@emulated()
async def test_a_misread_tool_call_has_other_arguments(lab: Lab) -> None:
    call = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "t1"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "get"}},
        "max_tokens": 50,
    }
    leg = await lab.prefilled(CHAT, call)
    said = [
        (await lab.post("decode/0", CHAT, leg)).json["choices"][0]["message"]["tool_calls"]
        for _ in range(2)
    ]
    assert said[0][0]["function"]["name"] == said[1][0]["function"]["name"] == "get"
    assert said[0][0]["function"]["arguments"] != said[1][0]["function"]["arguments"]


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector", lease_s=3.0)
async def test_an_expired_lease_is_misread(lab: Lab, connector: str) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    await asyncio.sleep(3.1)
    assert lab.leases() == {"expired": 1}
    late = await lab.post("decode/0", COMPLETIONS, leg | {"stream": True})
    assert late.status == 200
    assert late.text() != right
    assert [one.end for one in lab.fleet.misreads] == [LeaseEnd.EXPIRED]


@emulated()
async def test_a_released_lease_is_misread(lab: Lab) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    given_up = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.001)
    given_up.call.abort()
    await asyncio.sleep(0.001)
    again = await lab.post("decode/1", COMPLETIONS, leg)
    assert (again.status, again.text() == right) == (200, False)
    assert [one.end for one in lab.fleet.misreads] == [LeaseEnd.RELEASED]


@emulated()
async def test_a_second_pull_does_not_disturb_the_first(lab: Lab) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    both = [lab.send(f"decode/{rank}", COMPLETIONS, leg) for rank in (0, 1)]
    for exchanged in both:
        await exchanged.end()
    assert [exchanged.status for exchanged in both] == [200, 200]
    assert [exchanged.text() == right for exchanged in both] == [True, False]
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle


@pytest.mark.parametrize("connector", PULLING)
@pytest.mark.parametrize(
    "changes", [{"remote_request_id": "another"}, {"remote_block_ids": [[1, 2]]}], ids=str
)
@emulated("connector")
async def test_blocks_of_nobody_in_particular_are_read_all_the_same(
    lab: Lab, connector: str, changes: dict[str, Any]
) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    leg["kv_transfer_params"] |= changes
    answer = await lab.post("decode/0", COMPLETIONS, leg)
    assert (answer.status, answer.text() == right) == (200, False)
    assert [one.end for one in lab.fleet.misreads] == [None]
    assert lab.leases() == {"held": 1}


@emulated()
async def test_the_cache_of_another_prompt_of_the_same_length_is_used(lab: Lab) -> None:
    mine = VALUES | {"prompt": "t9 t2 t3"}
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    answer = await lab.post("decode/0", COMPLETIONS, leg | mine)
    assert (answer.status, answer.text()) == (200, right)
    assert lab.fleet.stats()["misreads"] == 1


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_prefiller_that_was_started_again_is_noticed(lab: Lab, connector: str) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    lab.fleet.kill("prefill/0")
    await lab.fleet.restore("prefill/0")
    assert (await lab.post("decode/0", COMPLETIONS, leg)).status == 500
    assert lab.fleet.misreads == []


@emulated(connector="mooncake")
async def test_mooncake_waits_for_what_was_pulled_already(lab: Lab) -> None:
    (url,) = lab.fleet.bootstrap_urls
    params = {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": url,
        "remote_engine_id": (await lab.get_url(f"{url}/query")).json["0"]["engine_id"],
        "transfer_id": "xfer-1",
    }
    to_prefill = {"do_remote_decode": True, "transfer_id": "xfer-1"}
    await lab.prefill(COMPLETIONS, VALUES, params=to_prefill)
    leg = VALUES | {"kv_transfer_params": params}
    assert (await lab.post("decode/0", COMPLETIONS, leg)).status == 200
    again = lab.send("decode/1", COMPLETIONS, leg)
    await asyncio.sleep(600.0)
    assert not again.status
    again.call.abort()
    assert lab.fleet.misreads == []
