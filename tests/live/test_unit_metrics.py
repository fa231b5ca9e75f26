"""What an endpoint picker reads of the unit: one sample of each metric, which says what the unit as a whole has."""

import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.site import Exchanged, Site, play, served, served_by_groups

from balanceroute.proxy.live.engines.engine_gauges import parse_engine_gauges
from balanceroute.proxy.live.settings.checks import PICKER_METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample

COMPLETIONS = "/v1/completions"
ON = {"picker_metrics": ["vllm"]}
LONG = {"prompt": " ".join(["t1"] * 600), "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def stream(site: Site, number: int = 0, **values: object) -> Exchanged:
    ids = [number, *[5] * 599]
    return site.send(COMPLETIONS, LONG | {"prompt": ids, "stream": True} | values)


async def told(site: Site, *headers: tuple[bytes, bytes]) -> "dict[str, Sample]":
    """Return the sample of each metric for pickers, as one of them reads it."""
    answer = await site.get("/metrics", [*headers])
    assert answer.status == 200
    families = {one.name: one for one in text_string_to_metric_families(answer.body.decode())}
    found = {}
    for what, name in PICKER_METRICS.items():
        if name in families:
            assert families[name].type == "gauge"
            # A picker takes the first one.
            (found[what],) = families[name].samples
            assert math.isfinite(found[what].value)
    return found


def values(found: "Mapping[str, Sample]", *names: str) -> list[float]:
    return [found[name].value for name in names]


@served(flags=ON, rank_kv_tokens=3_200)
async def test_an_empty_unit_says_so_at_once(site: Site) -> None:
    found = await told(site)
    assert values(found, "waiting", "running", "kv-usage", "cache") == [0, 0, 0, 1]
    await asyncio.sleep(2.5)
    found = await told(site)
    assert values(found, "waiting", "running", "kv-usage") == [0, 0, 0]
    # Those of both ranks together; llm-d reads these two labels.
    cache = found["cache"].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("32", "200")
    assert found["running"].labels == {"engine": "0", "model_name": "tiny"}
    assert "lora" not in found  # As of a vLLM without adapters.


@served(flags=ON | {"batch": 2}, batch_limit=2)
async def test_what_waits_and_what_runs_are_all_requests(site: Site) -> None:
    streams = [stream(site, number) for number in range(9)]
    waits = runs = 0
    decoding = 0
    while decoding < 4:
        await asyncio.sleep(0.23)  # Not when a prefill ends.
        found, state = await told(site), await site.state()
        decoding = state["decoding"]
        waits, runs = state["queued"] + state["pooled"], state["prefilling"] + decoding
        assert values(found, "waiting", "running") == [waits, runs]
    assert (waits, runs) == (9 - runs, runs)
    assert waits > 0
    for one in streams:
        one.call.abort()


@served(flags=ON | {"single_engine_limit": 1, "direct": "prefill"})
async def test_requests_that_one_engine_serves_alone_run_too(site: Site) -> None:
    held = site.handlers[b"/v1/embeddings"] = lambda engine, request, reply: None
    del held
    alone = [site.send("/v1/embeddings", {"input": "t1"}) for _ in range(3)]
    several = site.send(COMPLETIONS, LONG | {"n": 2, "prompt": "t1 t2", "temperature": 1})
    await asyncio.sleep(1.0)
    # Two prefillers have one each, and one waits for its turn.
    assert values(await told(site), "waiting", "running") == [1, 3]
    for one in (*alone, several):
        one.call.abort()


@served(flags=ON, rank_kv_tokens=3_200, step_base_ns=200_000_000)
async def test_kv_use_is_of_the_ranks_that_live_by_what_they_hold(site: Site) -> None:
    await asyncio.sleep(2.5)
    one = await stream(site).until_events(5)
    await asyncio.sleep(1.5)
    used = parse_engine_gauges(await page_of(site, "decode/0")).kv_cache_usage
    other = parse_engine_gauges(await page_of(site, "decode/1")).kv_cache_usage
    assert min(used, other) == 0 < max(used, other)
    (usage,) = values(await told(site), "kv-usage")
    assert usage == pytest.approx((used + other) / 2, rel=0.1)
    # The idle rank goes: what is left is as full as the busy one.
    idle = "decode/1" if used > other else "decode/0"
    site.fleet.faults.set(idle, unhealthy=True)
    await asyncio.sleep(12.0)
    found = await told(site)
    busy = parse_engine_gauges(
        await page_of(site, "decode/0" if used > other else "decode/1")
    ).kv_cache_usage
    assert values(found, "kv-usage") == [pytest.approx(busy, rel=0.1)]
    assert found["cache"].labels["num_gpu_blocks"] == "100"
    assert values(found, "running") == [1]
    one.call.abort()


async def page_of(site: Site, engine: str) -> bytes:
    return (await site.ask(engine, "/metrics", b"", "GET")).body


@pytest.mark.parametrize("how", ["killed", "asleep", "drained"])
@served(flags=ON, rank_kv_tokens=3_200)
async def test_a_unit_without_a_live_rank_is_full(site: Site, how: str) -> None:
    """It has no requests, and must not look like the best place for the next one."""
    await asyncio.sleep(2.5)
    for number in range(2):
        name = f"decode/{number}"
        if how == "killed":
            site.fleet.kill(name)
        elif how == "asleep":
            site.fleet.engine(name).asleep = True
        else:
            order = {"role": "decode", "url": site.fleet.engine(name).url}
            assert (await site.admin("/admin/instances/drain", order, method="POST")).status == 200
    await asyncio.sleep(12.0)
    found = await told(site)
    assert values(found, "waiting", "running", "kv-usage") == [0, 0, 1]
    assert found["cache"].labels["num_gpu_blocks"] == "0"
    assert (await site.get("/readiness")).status == 503


@served(flags=ON, rank_kv_tokens=3_200, step_base_ns=200_000_000)
async def test_without_scrapes_the_books_tell(site: Site) -> None:
    await asyncio.sleep(2.5)
    await told(site)  # The sizes are known by then.
    for number in range(2):
        site.fleet.faults.set(f"decode/{number}", malformed_scrape="garbage")
    one = await stream(site).until_events(5)
    await asyncio.sleep(6.0)
    (usage,) = values(await told(site), "kv-usage")
    assert 600 / 6_400 <= usage < 700 / 6_400
    one.call.abort()


@served(flags=ON | {"batch": 4}, step_base_ns=200_000_000)
async def test_without_any_size_the_slots_tell(site: Site) -> None:
    for number in range(2):
        site.fleet.faults.set(f"decode/{number}", malformed_scrape="garbage")
    one = await stream(site).until_events(5)
    found = await told(site)
    assert values(found, "kv-usage") == [1 / 8]
    assert found["cache"].labels["num_gpu_blocks"] == "0"
    one.call.abort()


@served(flags=ON | {"batch": 1}, batch_limit=1, adapters=("a", "b"))
async def test_adapters_are_told_by_what_their_requests_do(site: Site) -> None:
    await asyncio.sleep(2.5)
    found = await told(site)
    lora = {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert found["lora"].labels == lora
    assert found["lora"].value > 1e9
    streams = [stream(site, 1, model="b", max_tokens=2_000)]
    await streams[0].until_events(1)
    streams += [stream(site, number, model="a") for number in range(2, 5)]
    await asyncio.sleep(2.0)
    lora = lora | {"running_lora_adapters": "b", "waiting_lora_adapters": "a"}
    labels = (await told(site))["lora"].labels
    assert labels == lora | {"running_lora_adapters": "a,b"}
    for one in streams:
        one.call.abort()


@served_by_groups(flags=ON)
async def test_several_groups_are_one_unit(site: Site) -> None:
    await asyncio.sleep(2.5)
    streams = [stream(site, model=model) for model in ("small", "large", "large")]
    for one in streams:
        await one.until_events(1)
    found = await told(site)
    assert values(found, "waiting", "running") == [0, 3]
    assert found["running"].labels["model_name"] == ""
    for one in streams:
        one.call.abort()


def test_pickers_need_no_key_and_see_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("right")
    path.chmod(0o600)

    async def scenario(site: Site) -> None:
        bare = await site.get("/metrics")
        assert bare.status == 200
        assert b"vllm:num_requests_waiting" in bare.body
        assert b"balanceroute_" not in bare.body
        keyed = await site.get("/metrics", [(b"authorization", b"Bearer right")])
        assert keyed.body.startswith(b"# HELP vllm:num_requests_waiting")
        assert b"balanceroute_live_requests" in keyed.body
        assert (await site.get("/metrics", [(b"authorization", b"Bearer wrong")])).status == 401
        assert (await site.send("/metrics", method="POST").end()).status == 405
        assert (await site.get("/load")).status == 401
        # Who scrapes the engines and the proxy must not count requests twice.
        assert b"vllm:" not in (await site.admin("/metrics")).body

    play(scenario, flags=ON | {"api_key_file": str(path)})


@served(flags=ON | {"public_metrics": False})
async def test_the_rest_can_be_kept_from_clients(site: Site) -> None:
    assert b"balanceroute_" not in (await site.get("/metrics")).body
    assert len(await told(site)) == 4


def test_names_can_be_others_and_one_can_be_left_out() -> None:
    async def scenario(site: Site) -> None:
        page = (await site.get("/metrics")).body.decode()
        first = page[: page.index("# HELP balanceroute_")]
        names = [line.split("{")[0] for line in first.splitlines() if not line.startswith("#")]
        assert names == ["sglang:num_queue_reqs", "sglang:num_running_reqs"]

    names = ["running=sglang:num_running_reqs", "waiting=sglang:num_queue_reqs"]
    play(scenario, flags={"picker_metrics": names})


def test_off_there_is_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        assert b"\nvllm:" not in (await site.get("/metrics")).body

    name = "balanceroute.proxy.live.unit_metrics"
    monkeypatch.delitem(sys.modules, name, raising=False)
    play(scenario)
    assert name not in sys.modules


@served(flags=ON)
async def test_the_page_is_made_at_most_twenty_times_a_second(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    unit = sys.modules["balanceroute.proxy.live.unit_metrics"]
    cache = unit.UnitMetrics._cache

    def counted(self: object) -> object:
        made.append(self)
        return cache(self)

    monkeypatch.setattr(unit.UnitMetrics, "_cache", counted)
    for _ in range(100):
        await site.get("/metrics")
    assert len(made) < 20
    made.clear()
    for _ in range(10):
        await asyncio.sleep(0.06)
        await site.get("/metrics")
    assert len(made) == 10
