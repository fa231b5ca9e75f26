"""Engines that answer well and are not what they are taken for: what is said of them, and what is not."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, served

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 8,
    "ignore_eos": True,
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2"}],
    "max_tokens": 8,
    "ignore_eos": True,
}
WITHOUT_KV = "a prefiller computed a prompt and left no KV cache to pull"
DOUBTED = "an engine may not be what it is taken for"
ABSENT = "the prefill answer has no kv_transfer_params"


def said(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, str]]:
    return [one.fields for one in caplog.records if one.getMessage().startswith(message)]  # type: ignore[attr-defined]


async def counted(site: Site) -> dict[str, float]:
    """Return how many prefills left no KV cache, by prefiller and reason."""
    page = (await site.admin("/metrics")).body.decode()
    found = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("balanceroute_prefills_without_kv_total"):
            found[name.partition("{")[2].rstrip("}")] = float(value)
    return found


async def doubts(site: Site) -> dict[str, list[str]]:
    """Return what is doubted of each engine, by name, and check that all views agree."""
    rows = (await site.admin("/admin/instances")).json["instances"]
    names = {engine.url: engine.name for engine in site.fleet.engines}
    found = {names[row["url"]]: row.get("doubts", []) for row in rows}
    state = await site.state()
    for one in state["prefillers"]:
        assert one["doubts"] == found[names[one["name"]]]
    for one in state["ranks"]:
        assert one["doubts"] == found[names[one["url"]]]
    page = (await site.admin("/metrics")).body.decode()
    for index, name in enumerate(name for name in found if name.startswith("prefill")):
        line = f'balanceroute_prefiller_doubts{{prefiller="{index}"'
        (sample,) = [each for each in page.splitlines() if each.startswith(line)]
        assert float(sample.rpartition(" ")[2]) == len(found[name])
    return {name: reasons for name, reasons in found.items() if reasons}


@pytest.mark.parametrize("direct", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [False, True])
@served(flags=lambda direct: {"direct": direct})
async def test_a_prefill_that_leaves_no_kv_cache_is_said_counted_and_shown(
    site: Site, caplog: pytest.LogCaptureFixture, direct: str, stream: bool
) -> None:
    names = {engine.name: engine.url for engine in site.fleet.engines}
    site.fleet.faults.set("prefill/0", drop_kv_params=1.0)
    for _ in range(6):
        assert (await site.post(COMPLETIONS, BODY | {"stream": stream})).status == 200
    bad = len([one for one in site.received("prefill/0") if "kv_transfer_params" in one.values])
    assert bad > 1
    await site.ended(6)
    # Said at the first, and not at each.
    assert said(caplog, WITHOUT_KV) == [{"url": names["prefill/0"], "reason": ABSENT}]
    assert await counted(site) == {
        f'prefiller="{names["prefill/0"]}",reason="absent"': bad,
        f'prefiller="{names["prefill/1"]}",reason="absent"': 0,
    }
    assert await doubts(site) == {"prefill/0": [f"its last prefill left no KV cache: {ABSENT}"]}
    site.fleet.faults.clear()
    for _ in range(8):
        assert (await site.post(COMPLETIONS, BODY)).status == 200
    await site.ended(14)
    assert await doubts(site) == {}
    assert sum((await counted(site)).values()) == bad


@served(flags={"on_missing_kv": "fail"})
async def test_it_is_said_too_where_the_request_fails_for_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    assert (await site.post("/v1/chat/completions", CHAT)).status == 502
    assert len(said(caplog, WITHOUT_KV)) == 2  # One of each.
    assert sum((await counted(site)).values()) == len(site.received("prefill")) == 3


@served(prefillers=1)
async def test_an_engine_that_keeps_some_and_not_others_does_not_fill_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        site.fleet.faults.set("prefill", drop_kv_params=1.0)
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        site.fleet.faults.clear()
        assert (await site.post(COMPLETIONS, BODY)).status == 200
    assert len(said(caplog, WITHOUT_KV)) == 1
    assert sum((await counted(site)).values()) == 10
    await asyncio.sleep(60.0)
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    assert (await site.post(COMPLETIONS, BODY)).status == 200
    assert len(said(caplog, WITHOUT_KV)) == 2


@served(prefillers=1)
async def test_a_restart_takes_back_what_was_said_of_an_engine(site: Site) -> None:
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    assert (await site.post(COMPLETIONS, BODY)).status == 200
    assert len(await doubts(site)) == 1
    site.fleet.faults.set("prefill", refuse=True)
    instances = site.world.plane.deployment.instances
    await site.until(lambda: not instances.up())
    site.fleet.faults.clear()
    await site.until(lambda: len(instances.up()) == 1)
    assert await doubts(site) == {}


async def ended_at_its_first_token(site: Site) -> None:
    site.fleet.faults.set("prefill", eos_first=1.0)
    values = {name: value for name, value in BODY.items() if name != "ignore_eos"}
    assert (await site.post(COMPLETIONS, values)).json["choices"][0]["finish_reason"] == "stop"


async def one_token_prompt(site: Site) -> None:
    for _ in range(2):  # The second finds it in a prefix cache.
        assert (await site.post(COMPLETIONS, BODY | {"prompt": [7]})).status == 200


async def repeated_prompt(site: Site) -> None:
    for _ in range(4):
        assert (await site.post(COMPLETIONS, BODY | {"prompt": [7] * 64})).status == 200


async def one_token_answer(site: Site) -> None:
    assert (await site.post(COMPLETIONS, BODY | {"max_tokens": 1})).status == 200


async def several_sequences(site: Site) -> None:
    assert (await site.post(COMPLETIONS, BODY | {"n": 2})).status == 200
    assert (await site.post(COMPLETIONS, BODY | {"prompt": ["t1", "t2 t3"]})).status == 200


async def client_gone(site: Site) -> None:
    exchange = site.send(COMPLETIONS, BODY)
    await asyncio.sleep(0.005)
    exchange.call.abort()
    assert (await site.post(COMPLETIONS, BODY)).status == 200


async def aborted_by_order(site: Site) -> None:
    before = len(site.received("decode"))
    exchange = site.send(COMPLETIONS, BODY | {"max_tokens": 500})
    await site.until(lambda: len(site.received("decode")) > before)
    await site.admin("/abort_requests", {}, method="POST")
    await exchange.end()


async def other_routes(site: Site) -> None:
    assert (await site.post("/v1/chat/completions", CHAT)).status == 200
    values = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
    assert (await site.post("/inference/v1/generate", values)).status == 200


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-ascend", "mooncake-layerwise"])
@served("connector")
async def test_what_is_as_it_should_be_stays_unsaid(
    site: Site, caplog: pytest.LogCaptureFixture, connector: str
) -> None:
    for requests in (
        one_token_prompt,
        repeated_prompt,
        one_token_answer,
        several_sequences,
        client_gone,
        aborted_by_order,
        other_routes,
    ):
        await requests(site)
    if connector != "mooncake-layerwise":  # Whose rank has no token of such a prefill.
        await ended_at_its_first_token(site)
    await asyncio.sleep(70.0)  # The engines are asked again meanwhile.
    assert await doubts(site) == {}
    assert not any((await counted(site)).values())
    assert said(caplog, WITHOUT_KV) == said(caplog, DOUBTED) == []


@pytest.mark.parametrize(
    "flags", [{"local_prefill_tokens": 1000}, {"first_token": "prefill"}, {"direct": "prefill"}]
)
@served("flags")
async def test_prompts_that_ranks_compute_by_choice_stay_unsaid(
    site: Site, caplog: pytest.LogCaptureFixture, flags: dict[str, object]
) -> None:
    for stream in (False, True):
        assert (await site.post(COMPLETIONS, BODY | {"stream": stream})).status == 200
    await asyncio.sleep(70.0)
    assert await doubts(site) == {}
    assert said(caplog, WITHOUT_KV) == said(caplog, DOUBTED) == []


@served(flags={"model": ["other"]})
async def test_a_model_that_no_engine_serves_is_said_at_the_start(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "does not serve 'other', but tiny"
    assert (await site.get("/ready")).status == 200  # It may be loaded later.
    found = await doubts(site)
    assert len(found) == len(site.fleet.engines)
    assert all(reasons == [reason] for reasons in found.values())
    await asyncio.sleep(130.0)
    told = said(caplog, DOUBTED)
    assert sorted(one["url"] for one in told) == sorted(e.url for e in site.fleet.engines)
    assert {one["reason"] for one in told} == {reason}


@served()
async def test_what_its_pages_say_may_change(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    page = (
        b'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
        b'vllm:prompt_tokens_total{engine="0"} 100.0\n'
        b'vllm:external_prefix_cache_queries_total{engine="0"} %d\n'
    )
    asked = [0]

    def metrics(_engine: str, _request: "HttpRequest", reply: "Reply") -> None:
        reply.send(200, [], page % asked[0])

    site.rank_handlers[b"/metrics"] = metrics
    await asyncio.sleep(61.0)
    found = await doubts(site)
    assert found.keys() == {"decode/0", "decode/1"}
    for (reason,) in found.values():
        assert reason.startswith("computed prompts and asked no KV connector for any: ")
    asked[0] = 50
    await asyncio.sleep(61.0)
    found = await doubts(site)
    assert {reason for (reason,) in found.values()} == {
        "has no metrics of NIXL: its --kv-transfer-config is missing, or is of another connector"
    }
    site.rank_handlers.clear()
    await asyncio.sleep(61.0)
    assert await doubts(site) == {}
    assert len(said(caplog, DOUBTED)) == 4


@served(prefillers=1)
async def test_an_engine_is_not_used_and_not_counted_before_it_was_probed(site: Site) -> None:
    held: list[Reply] = []

    def health(_engine: str, _request: "HttpRequest", reply: "Reply") -> None:
        held.append(reply)

    async def order(site: Site, path: str) -> Exchanged:
        url = site.fleet.engine("prefill/0").url
        return await site.admin(path, {"role": "prefill", "url": url}, method="POST")

    assert (await order(site, "/admin/instances/remove")).status == 200
    assert (await site.get("/ready")).status == 503
    site.handlers[b"/health"] = health
    adding = asyncio.create_task(order(site, "/admin/instances"))
    for _ in range(10):
        await asyncio.sleep(0.15)
        assert (await site.get("/ready")).status == 503
        assert (await site.admin("/ready")).status == 503
        refused = await site.post(COMPLETIONS, BODY)
        assert refused.status == 503
        assert "no engine of each role is up" in refused.json["error"]["message"]
    assert site.received("prefill") == []
    site.handlers.clear()
    for reply in held:
        reply.send(200, [], b"")
    assert (await adding).status == 200
    assert (await site.get("/ready")).status == 200
    assert (await site.post(COMPLETIONS, BODY)).status == 200
