"""Prefix caches of emulated engines, as clients and /metrics see them."""

import pytest
from tests.lab.emulate.lab import COMPLETIONS, Lab, emulated

PROMPT = list(range(100, 300))  # Six blocks of 32 tokens, and eight tokens.


def values(prompt: object, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0.0} | more


async def counters(lab: Lab, engine: str) -> tuple[float, float]:
    page = (await lab.get(engine, "/metrics")).body.decode()
    found = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("vllm:prefix_cache")
    }
    return found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]


@pytest.mark.parametrize("engine", ["prefill/0", "decode/0"])
@emulated(
    prefix_cache_tokens=10_000,
    prompt_tokens_details=True,
    prefill_ns_per_token=1e6,
    prefill_base_ns=0,
)
async def test_an_engine_computes_a_known_beginning_once(lab: Lab, engine: str) -> None:
    times, cached = [], []
    for prompt in (PROMPT, PROMPT, PROMPT[:100], [1, *PROMPT]):
        begin_s = lab.loop.time()
        answer = await lab.post(engine, COMPLETIONS, values(prompt, max_tokens=1))
        times.append(lab.loop.time() - begin_s)
        cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 192, 96, 0]
    # 1 ms a token.
    assert times[0] - times[1] == pytest.approx(0.192, abs=0.005)
    assert await counters(lab, engine) == (701, 288)


@emulated(prefix_cache_tokens=10_000, prompt_tokens_details=True)
async def test_a_stream_tells_cached_tokens_too(lab: Lab) -> None:
    body = values(PROMPT, stream=True, stream_options={"include_usage": True})
    body |= {"n": 2, "temperature": 1.0}
    for cached in (0, 192):
        answer = await lab.post("decode/0", COMPLETIONS, body)
        usage = [chunk["usage"] for chunk in answer.chunks if chunk.get("usage")][-1]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


@emulated(prefix_cache_tokens=10_000, prompt_tokens_details=True)
async def test_a_rank_keeps_what_it_pulled(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, values(PROMPT))
    pulled = await lab.post("decode/0", COMPLETIONS, leg)
    assert pulled.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
    again = await lab.post("decode/0", COMPLETIONS, values(PROMPT))
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    elsewhere = await lab.post("decode/1", COMPLETIONS, values(PROMPT))
    assert elsewhere.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@emulated(prefix_cache_tokens=8 * 32, prompt_tokens_details=True)
async def test_the_cache_is_bounded_and_lost_with_its_engine(lab: Lab) -> None:
    async def cached(prompt: list[int]) -> int:
        answer = await lab.post("prefill/0", COMPLETIONS, values(prompt, max_tokens=1))
        found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    other = list(range(1_000, 1_200))
    assert [await cached(prompt) for prompt in (PROMPT, other, PROMPT, PROMPT)] == [
        *(0, 0),
        # Of its six blocks the last four were dropped.
        *(64, 192),
    ]
    lab.fleet.kill("prefill/0")
    await lab.fleet.restore("prefill/0")
    lab.close()
    lab._endpoints.clear()
    assert await cached(PROMPT) == 0


@emulated(prompt_tokens_details=True)
async def test_without_a_cache_nothing_is_cached(lab: Lab) -> None:
    for _ in range(2):
        answer = await lab.post("prefill/0", COMPLETIONS, values(PROMPT, max_tokens=1))
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await counters(lab, "prefill/0") == (0, 0)


# A decode rank that computes a prompt: the step takes longer for every rank.


@emulated(prefill_ns_per_token=1e6)
async def test_all_ranks_wait_for_a_prompt(lab: Lab) -> None:
    values = {"model": "tiny", "max_tokens": 40, "stream": True, "ignore_eos": True}
    running = lab.send("decode/0", COMPLETIONS, values | {"prompt": "a b"})
    await running.tokens(3)
    before = lab.fleet.stats()
    begin_s = lab.loop.time()
    more = values | {"prompt": list(range(100, 400)), "max_tokens": 2, "n": 2}
    await lab.send("decode/1", COMPLETIONS, more).tokens(1)
    assert lab.loop.time() - begin_s > 0.3
    await running.tokens(30)
    after = lab.fleet.stats()
    steps = after["steps"] - before["steps"]
    # 300 tokens of 1 ms, once for both sequences.
    assert after["busy_s"] - before["busy_s"] == pytest.approx(0.3 + 0.03 * steps, abs=0.01)
