"""The names by which prefillers' KV cache events tell of texts, in the whole proxy."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.live.conftest import Play, Seen, Site

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINES: dict[str, Any] = {
    "prefix_cache_tokens": 100_000,
    "block_tokens": 16,
    "prompt_tokens_details": True,
    "max_model_len": 100_000,
    "kv_events": True,
    "adapters": ("adapter",),
}
FLAGS = {"prefill_choice": "prefix-aware"}
WORDS = " ".join(f"w{number}" for number in range(1_000))
IDS = list(range(2_000))


def name_of(seen: "Seen") -> bytes | None:
    return seen.request.header(b"x-session-id")


@pytest.mark.parametrize("relays", [0, 2])
@pytest.mark.parametrize(
    ("path", "values", "named"),
    [
        (CHAT, {"messages": [{"role": "user", "content": WORDS}]}, True),
        (COMPLETIONS, {"prompt": WORDS}, True),
        (COMPLETIONS, {"prompt": [WORDS]}, True),
        # These are looked up by their ids: of the model itself.
        (COMPLETIONS, {"prompt": IDS}, False),
        (COMPLETIONS, {"prompt": IDS, "model": "adapter"}, True),
        (COMPLETIONS, {"prompt": IDS, "cache_salt": "salt"}, True),
        # Too short to be found again.
        (COMPLETIONS, {"prompt": "short"}, False),
    ],
)
def test_the_prefill_leg_alone_names_a_text(
    play: "Play", relays: int, path: str, values: dict[str, object], named: bool
) -> None:
    async def scenario(site: "Site") -> None:
        await asyncio.sleep(2.0)  # Until the models are known.
        body = {"model": "tiny", "max_tokens": 3, "session_id": "mine", **values}
        client = [(b"x-session-id", b"of the client")]
        assert (await site.post(path, body, client)).status == 200
        (prefill,), (decode,) = site.received("prefill", path), site.received("decode", path)
        name = name_of(prefill)
        assert (name is not None and name.startswith(b"br-")) is named
        assert ("session_id" in prefill.values) is not named
        assert name_of(decode) is None
        assert decode.values["session_id"] == "mine"

    play(scenario, relays=relays, flags=FLAGS, **ENGINES)


def test_nobody_is_told_names_where_nobody_listens(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        body = {"model": "tiny", "prompt": WORDS, "max_tokens": 3, "session_id": "mine"}
        assert (await site.post(COMPLETIONS, body)).status == 200
        assert all(name_of(seen) is None for seen in site.seen)
        assert all(seen.values["session_id"] == "mine" for seen in site.received("", COMPLETIONS))

    play(scenario, flags=FLAGS, **{**ENGINES, "kv_events": False})


@pytest.mark.parametrize("relays", [0, 2])
def test_what_other_prefillers_computed_is_found_by_its_text(play: "Play", relays: int) -> None:
    """A conversation that one prefiller has by name, and another by its own doing."""

    async def scenario(site: "Site") -> None:
        await asyncio.sleep(2.0)
        body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
        assert (await site.post(CHAT, body)).status == 200
        (seen,) = site.received("prefill", CHAT)
        other = next(one for one in ("prefill/0", "prefill/1") if one != seen.engine)
        assert (await site.ask(other, CHAT, body)).status == 200
        blocks = site.world.scheduler.prefillers._choice._memory._heard  # type: ignore[attr-defined]
        await site.until(lambda: min(map(blocks.engines.blocks, (0, 1))) > 50)
        (text,) = blocks.engines.texts._prompts.values()
        assert [blocks.engines.leading(one, text.tokens) for one in (0, 1)] == [
            len(text.tokens)
        ] * 2

    play(scenario, relays=relays, flags=FLAGS, **ENGINES)
