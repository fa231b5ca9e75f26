"""`--admission early` in a proxy: the hopeless are refused at once, and the log compares."""

import pytest
from tests.live.frontend.gateway_requests import BODY
from tests.support.site import Exchanged, Site, play, served

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("connector", ["nixl", "mooncake-layerwise"])
def test_a_request_that_needs_no_prefiller_is_refused_early_too(connector: str) -> None:
    async def scenario(site: Site) -> None:
        # A prefiller's prompts take a moment, an answer 2 s on one of two ranks with a slot each.
        def send(*headers: tuple[bytes, bytes]) -> Exchanged:
            values = BODY | {"max_tokens": 20, "ignore_eos": True, "stream": True}
            return site.send(COMPLETIONS, values, headers=list(headers))

        for _ in range(3):
            await send().end()
        load = [send() for _ in range(12)]
        await load[3].end()
        begin_s = site.loop.time()
        refused = await send((b"x-request-deadline-ms", b"2000")).end()
        assert refused.status == 503
        assert "the first token is expected in" in refused.json["error"]["message"]
        assert site.loop.time() - begin_s < 0.1
        patient = send((b"x-request-deadline-ms", b"60000"))
        for one in (*load, patient):
            assert (await one.end()).done
        record = site.world.ended[-1]
        assert record.first_token_ns is not None
        assert record.expected_ttft_ns is not None
        ratio = (record.first_token_ns - record.arrived_ns) / record.expected_ttft_ns
        assert 0.6 < ratio < 1.6

    flags = {"admission": "early", "client_deadline": True, "batch": 1, "pool_limit": 2}
    play(
        scenario,
        connector=connector,
        batch_limit=1,
        step_base_ns=100_000_000,
        flags=flags | {"connector": connector},
    )


def test_what_is_expected_is_the_token_that_the_client_gets() -> None:
    async def scenario(site: Site) -> None:
        def send(*, early: bool, due: bool = False) -> Exchanged:
            values = BODY | {"max_tokens": 20, "ignore_eos": True, "stream": True, "temperature": 0}
            headers = [(b"x-request-deadline-ms", b"1000")] if due else []
            values |= {} if early else {"stop": ["never"]}
            return site.send(COMPLETIONS, values, headers=headers)

        # Each takes one of two ranks for 2 s, and all are prefilled at once.
        load = [send(early=number % 2 == 0) for number in range(16)]
        await load[-1].end()
        load += [send(early=True) for _ in range(8)]
        await load[-1].until_events(1)
        soon, late = send(early=True, due=True), send(early=False, due=True)
        assert (await late.end()).status == 503
        assert "the first token is expected in" in late.json["error"]["message"]
        for one in (*load, soon):
            assert (await one.end()).done
        ended = [one for one in await site.ended(26) if one.status == 200]
        told = [one.expected_ttft_ns for one in ended if one.early_first_token]
        assert max(one or 0 for one in told) < 1e9

    flags = {"admission": "early", "client_deadline": True, "first_token": "prefill", "batch": 1}
    play(
        scenario,
        flags=flags | {"pool_limit": 100, "lease_s": 1000.0},
        batch_limit=1,
        step_base_ns=100_000_000,
        lease_s=1000.0,
    )


@pytest.mark.parametrize("admission", ["bounded", "early"])
@served(
    prefillers=1,
    prefill_base_ns=1_000_000_000,
    flags=lambda admission: {"admission": admission, "probe_limit": 1, "client_deadline": True},
)
async def test_a_request_that_cannot_be_in_time_is_refused_at_once(
    site: Site, admission: str
) -> None:
    def send(number: int, deadline_ms: bytes | None = None) -> Exchanged:
        headers = [] if deadline_ms is None else [(b"x-request-deadline-ms", deadline_ms)]
        return site.send(
            COMPLETIONS, BODY | {"prompt": [number] * 20, "stream": True}, headers=headers
        )

    # A prefill takes a second: after some, the rate of starts is known.
    for number in range(1, 5):
        assert (await send(number).end()).status == 200
    queued = [send(10 + number) for number in range(8)]
    await queued[2].end()
    begin_s = site.loop.time()
    hopeless = await send(30, b"2000").end()
    assert hopeless.status == 503
    waited_s = site.loop.time() - begin_s
    if admission == "early":
        assert waited_s < 0.1
        assert int(hopeless.header(b"retry-after") or b"0") >= 2
        assert "the first token is expected in" in hopeless.json["error"]["message"]
    else:
        assert waited_s == pytest.approx(2.0, abs=0.3)
    patient = send(31, b"60000")
    assert (await patient.end()).status == 200
    record = site.world.ended[-1]
    assert record.first_token_ns is not None
    if admission == "early":
        assert record.expected_ttft_ns is not None
        ratio = (record.first_token_ns - record.arrived_ns) / record.expected_ttft_ns
        assert 0.7 < ratio < 1.4
    else:
        assert record.expected_ttft_ns is None
    page = (await site.get("/metrics")).body
    count = b"balanceroute_time_to_first_token_expectation_ratio_count 0"
    assert (count in page) == (admission == "bounded")
