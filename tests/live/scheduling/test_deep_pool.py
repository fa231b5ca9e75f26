"""With `--first-token prefill` the first token of what waits for a rank does not wait before prefill."""

import asyncio
from typing import Any

import pytest
from tests.support.site import Site, play

COMPLETIONS = "/v1/completions"
# Of two ranks of four slots: the limit that balance needs is 27.
CLIENTS = 48
REQUESTS = 260


@pytest.mark.parametrize(
    ("first_token", "least_s", "most_s"), [("prefill", 0, 0.3), ("decode", 5, 10)]
)
def test_a_first_token_waits_for_its_prefill_alone(
    first_token: str, least_s: float, most_s: float
) -> None:
    async def scenario(site: Site) -> None:
        def send(number: int) -> Any:
            values = {"model": "tiny", "prompt": [1 + number % 50] * 20, "max_tokens": 10}
            values |= {"ignore_eos": True, "stream": True, "temperature": 0}
            return site.send(COMPLETIONS, values)

        flying = [send(number) for number in range(CLIENTS)]
        for number in range(CLIENTS, REQUESTS):
            await flying.pop(0).end()
            flying.append(send(number))
        for one in flying:
            await one.end()
        await site.rest()
        # The rate of departures is known after a lease.
        begin_ns = min(one.arrived_ns for one in site.world.ended)
        late = [one for one in site.world.ended if one.arrived_ns > begin_ns + 32_000_000_000]
        waits = sorted(one.first_token_ns - one.arrived_ns for one in late if one.first_token_ns)
        assert len(waits) > 50
        assert least_s <= waits[len(waits) * 9 // 10] / 1e9 <= most_s
        assert {one.lease_lapses for one in site.world.ended} == {0}

    flags = {"first_token": first_token, "batch": 4, "policy": "br-0", "lease_s": 30}
    play(scenario, flags=flags, step_base_ns=150_000_000, prefill_ns_per_token=1_000.0)


def test_before_anything_is_learned_prefillers_hold_no_more_than_fits() -> None:
    """All slots are taken at once, and a deep pool begins with half as many."""
    fits, prompt = 2_000, 100

    async def scenario(site: Site) -> None:
        await asyncio.sleep(3.0)  # Engines tell once a second.
        prefillers = site.world.scheduler.prefillers
        values = {"model": "tiny", "max_tokens": 60, "ignore_eos": True, "stream": True}
        flying = [
            site.send(COMPLETIONS, values | {"prompt": [1 + number] * prompt, "temperature": 0})
            for number in range(240)
        ]
        most = [0, 0]
        while len(site.world.ended) < len(flying):
            most = [max(pair) for pair in zip(most, prefillers.held_tokens, strict=True)]
            await asyncio.sleep(0.05)
        for one in flying:
            assert (await one.end()).done
        assert {(one.lease_lapses, one.retries) for one in site.world.ended} == {(0, 0)}
        assert 0.8 * fits < min(most)
        assert max(most) <= 0.95 * fits

    flags = {"first_token": "prefill", "batch": 64, "policy": "br-0", "lease_s": 30}
    play(
        scenario,
        flags=flags,
        batch_limit=64,
        step_base_ns=150_000_000,
        prefill_ns_per_token=1_000.0,
        prefiller_kv_tokens=fits,
    )
