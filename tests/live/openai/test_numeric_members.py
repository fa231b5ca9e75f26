"""Numbers of clients: read as vLLM reads them, and no value of any of them ends service."""

import json

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.shape import MOST_TOKENS, count, flag, integer

COMPLETIONS = "/v1/completions"
HUGE = (2**31, 2**63, 10**400)
# Not those that the emulated engines themselves cannot take: temperature, logprobs.
NUMERIC = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"),
    *("seed", "priority", "top_k", "top_p", "min_p", "presence_penalty"),
    *("repetition_penalty", "truncate_prompt_tokens", "stop_token_ids", "stream", "echo"),
)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (5, 5),
        (True, 1),
        (5.0, 5),
        (-5.0, -5),
        (5.5, None),
        (1e30, None),
        (float("inf"), None),
        ("5", 5),
        (" +5 ", 5),
        ("5.00", 5),
        ("1_000", 1000),
        ("-7", -7),
        ("5.5", None),
        ("_5", None),
        ("0x5", None),
        ("", None),
        ("\uff15", None),
        ("9" * 4300, int("9" * 4300)),
        ("9" * 4301, None),
        (None, None),
        ([5], None),
    ],
)
def test_integers_are_those_of_pydantics_lax_mode(value: object, number: int | None) -> None:
    assert integer(value) == number


SET = ["true", "TRUE", "t", "yes", "Y", "on", "1", 1, 1.0, True]
NOT_SET = ["false", "False", "f", "no", "N", "off", "0", 0, 0.0, False]
NONE = ["", " true", "2", 2, -1, 0.5, None, [], float("nan")]


@pytest.mark.parametrize(("words", "said"), [(SET, True), (NOT_SET, False), (NONE, None)])
def test_flags_are_those_of_pydantics_lax_mode(words: list[object], said: bool | None) -> None:
    assert [flag(word) for word in words] == [said] * len(words)


def test_counts_are_bounded_from_both_sides() -> None:
    assert count(10**400, 1) == MOST_TOKENS == 2**31 - 1
    assert count(0, 1) is None
    assert count("1", 1) == 1


@pytest.mark.parametrize("predictor", ["survival", "exact-match"])
@served(flags=lambda predictor: {"policy": "br-h", "predictor": predictor}, max_model_len=64)
async def test_no_number_of_a_client_keeps_others_from_being_served(
    site: Site, predictor: str
) -> None:
    """Max_tokens from 2**63 on stopped all admissions while that request was open."""
    hostile = []
    for name in NUMERIC:
        for number in HUGE:
            for value in (number, -number, [number]):
                members = {"prompt": f"{name} {number}", "max_tokens": 3, name: value}
                hostile.append(site.send(COMPLETIONS, members))
                if len(hostile) % 50 == 0:
                    good = await site.post(COMPLETIONS, {"prompt": "a b c", "max_tokens": 2})
                    assert good.status == 200
    for one in hostile:
        await one.end()
        assert one.error is None
        assert one.status in (200, 400), (one.status, one.body)


@pytest.mark.parametrize("limit", [2**63, 2**64 - 1, 10**20])
@served(flags={"policy": "br-h", "predictor": "survival"}, max_model_len=64)
async def test_an_unlimited_answer_that_waits_does_not_hold_up_others(
    site: Site, limit: int
) -> None:
    """It stayed in the pool, and each decision of the scheduler ended in an error."""
    body = {"prompt": "a b c", "max_tokens": limit}
    first = [site.send(COMPLETIONS, body) for _ in range(4)]
    assert (await site.post(COMPLETIONS, {"prompt": "d", "max_tokens": 4})).status == 200
    # Beyond the context, as the decode rank finds out.
    assert [(await one.end()).status for one in first] == [400] * 4


@served()
async def test_a_byte_order_mark_is_passed_over(site: Site) -> None:
    """FastAPI takes a body with one, and so does vLLM."""
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "caf\u00e9", "max_tokens": 2}).encode()
    assert (await site.post(COMPLETIONS, body)).status == 200
    assert {seen.values["prompt"] for seen in site.seen} == {"caf\u00e9"}
