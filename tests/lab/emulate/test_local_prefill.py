"""A decode rank that computes a prompt: the step takes longer for every rank."""

import pytest
from tests.lab.emulate.lab import COMPLETIONS, Lab, emulated


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
