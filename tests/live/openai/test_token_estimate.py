"""The tokens of a prompt before it was counted: texts, several of them, images, and what is no text."""

import pytest
from msgspec import structs
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.shape import DATA_TOKENS, Api, Shape, TokenEstimate

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = Shape(Api.CHAT, "m", False, 1, "", None, 1_600, 0, None)


def test_text_is_taken_by_its_length_and_by_what_was_counted() -> None:
    estimate = TokenEstimate()
    assert estimate.tokens(TEXT) == 400
    for _ in range(200):
        estimate.learn(TEXT, 800)
    assert estimate.tokens(TEXT) == pytest.approx(800, rel=0.01)
    assert estimate.tokens(structs.replace(TEXT, prompt_characters=1)) == 1
    assert estimate.tokens(structs.replace(TEXT, prompt_tokens=7)) == 7


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"prompt_data": 1}, 1_500),
        ({"prompt_characters": 1_000_000}, 5),
        ({"prompt_characters": 2}, 100_000),
        ({"prompt_tokens": 5}, 5),
    ],
)
def test_what_was_not_counted_as_text_teaches_nothing(
    changes: dict[str, int], counted: int
) -> None:
    """Neither an image nor a prompt that is mostly tools spoils the estimate of text."""
    estimate = TokenEstimate()
    for _ in range(100):
        estimate.learn(structs.replace(TEXT, **changes), counted)
    assert estimate.tokens(TEXT) == 400


def test_an_image_counts_as_a_constant() -> None:
    assert TokenEstimate().tokens(structs.replace(TEXT, prompt_data=2)) == 400 + 2 * DATA_TOKENS


@pytest.mark.parametrize("characters", [64 << 20, 10**12])
def test_all_sequences_together_stay_countable(characters: int) -> None:
    """The estimate of each sequence times their number does not overflow 32 bits."""
    shape = structs.replace(TEXT, prompt_characters=characters, sequences=128)
    assert TokenEstimate().tokens(shape) * 128 < 2**31
    exact = structs.replace(shape, prompt_tokens=characters)
    assert TokenEstimate().tokens(exact) * 128 < 2**31


@served()
async def test_several_texts_are_charged_what_they_have(site: Site) -> None:
    """Sixteen prompts of a thousand tokens were charged sixteen times their sum."""
    prompts = [" ".join(f"t{i}" for i in range(start, start + 1_000)) for start in range(16)]
    values = {"model": "tiny", "prompt": prompts, "max_tokens": 4, "stream": True}
    exchange = site.send(COMPLETIONS, values)
    await exchange.until_events(1)
    (rank,) = [load for load in site.world.scheduler.ledger.loads.tolist() if load]
    assert 10_000 < rank < 30_000
    await exchange.end()


@served()
async def test_an_image_does_not_move_what_texts_are_charged(site: Site) -> None:
    """After one image of a megabyte a text of 400 tokens counted as one."""
    text = " ".join(f"t{i}" for i in range(400))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    for content in (text, [image, {"type": "text", "text": "t1"}], text):
        talk = [{"role": "user", "content": content}]
        values = {"model": "tiny", "messages": talk, "max_tokens": 2}
        assert (await site.post(CHAT, values)).status == 200
    before, picture, after = (record.prompt_estimate for record in site.world.ended)
    assert picture < 2 * DATA_TOKENS
    assert after == pytest.approx(before, rel=0.2)


# The priority of a request.


@pytest.mark.parametrize("connector", ["nixl", "mooncake-layerwise"])
@pytest.mark.parametrize("passed", [False, True])
@served("connector", flags=lambda passed: {"pass_priority": passed})
async def test_a_priority_reaches_both_legs_if_it_is_to(
    site: Site, connector: str, passed: bool
) -> None:
    """`priority` was dropped without a word."""
    values = {"model": "tiny", "prompt": "t1", "max_tokens": 3, "priority": -5}
    assert (await site.post(COMPLETIONS, values)).status == 200
    assert {seen.engine.partition("/")[0] for seen in site.seen} == {"prefill", "decode"}
    assert {seen.values.get("priority") for seen in site.seen} == {-5 if passed else None}
    refused = await site.post(COMPLETIONS, values | {"priority": 2**63})
    assert refused.status == 400
