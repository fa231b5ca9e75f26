"""Engines that serve different models: who gets which request."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.site import Site, play, served

from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.frontend.groups import refuse_unlisted

COMPLETIONS = "/v1/completions"
TWO = {
    "prefill/0": ("alpha",),
    "prefill/1": ("beta",),
    "decode/0": ("alpha",),
    "decode/1": ("beta",),
}
ADAPTER = {"prefill/1": ("tiny", "adapter"), "decode/0": ("tiny", "adapter")}


def ask(model: str, **values: object) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 3} | values


def test_a_model_is_left_to_the_engines_unless_models_are_listed() -> None:
    assert refuse_unlisted("whatever", ()) is None
    assert refuse_unlisted("", ("tiny",)) is None


def test_a_listed_model_is_served_and_no_other() -> None:
    assert refuse_unlisted("lora-a", ("tiny", "lora-a")) is None
    assert refuse_unlisted("Tiny", ("tiny", "lora-a")) == (
        404,
        "The model `Tiny` does not exist. Valid aliases: tiny, lora-a.",
    )


def test_a_long_name_is_not_repeated_whole() -> None:
    refusal = refuse_unlisted("x" * 10_000, ("tiny",))
    assert refusal is not None
    assert len(refusal[1]) < 300


async def known(site: Site) -> None:
    """Wait until the proxy has read the lists of all engines."""
    await asyncio.sleep(2.0)


def engines(site: Site) -> Counter[tuple[str, str]]:
    """Return how many generation requests of each model each engine received."""
    return Counter(
        (one.engine, one.values["model"]) for one in site.seen if one.path != "/v1/models"
    )


def only_where_served(site: Site, served: Mapping[str, tuple[str, ...]]) -> None:
    assert engines(site)
    for engine, model in engines(site):
        assert model in served[engine], f"{engine} got a request for {model}"


@pytest.mark.parametrize("connector", ["nixl", "mooncake-layerwise"])
@pytest.mark.parametrize("policy", ["br-h", "br-0", "br-0-bypass", "fifo", "jsq", "round-robin"])
@served("connector", flags=lambda policy: {"policy": policy}, engine_models=TWO)
async def test_a_request_goes_to_the_engines_of_its_model(
    site: Site, policy: str, connector: str
) -> None:
    """Engines were chosen by chance, so that they said 404 to their own model."""
    await known(site)
    for model in ("alpha", "beta", "beta", "alpha"):
        assert (await site.post(COMPLETIONS, ask(model))).status == 200
    sent = [site.send(COMPLETIONS, ask(m, stream=True)) for m in ("alpha",) * 6 + ("beta",) * 2]
    for one in sent:
        assert (await one.end()).status == 200
    only_where_served(site, TWO)


@served(engine_models=ADAPTER)
async def test_an_adapter_of_some_engines_finds_them(site: Site) -> None:
    """Adapters that some engines have loaded."""
    await known(site)
    sent = [site.send(COMPLETIONS, ask(m, stream=True)) for m in ("adapter", "tiny") * 6]
    for one in sent:
        assert (await one.end()).status == 200
    found = engines(site)
    assert found["prefill/1", "adapter"] == found["decode/0", "adapter"] == 6
    assert not found["prefill/0", "adapter"] + found["decode/1", "adapter"]
    assert found["prefill/0", "tiny"] > 0
    assert found["decode/1", "tiny"] > 0
    # An engine may load one on demand: it is asked.
    unlisted = await site.post(COMPLETIONS, ask("gamma"))
    assert (unlisted.status, site.seen[-1].values["model"]) == (404, "gamma")


@pytest.mark.parametrize("policy", ["br-h", "br-0", "br-0-bypass", "fifo"])
def test_one_model_that_is_full_does_not_hold_up_another(policy: str) -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        slow = [site.send(COMPLETIONS, ask("alpha", max_tokens=400, stream=True)) for _ in range(6)]
        await asyncio.sleep(1.0)
        assert (await site.post(COMPLETIONS, ask("beta"))).status == 200
        assert not any(one.over for one in slow)
        for one in slow:
            assert (await one.end()).status == 200
        only_where_served(site, TWO)

    flags = {"batch": 1, "policy": policy}
    play(scenario, flags=flags, engine_models=TWO, batch_limit=1)


def test_a_model_that_nobody_serves_is_refused(caplog: Any) -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        missing = await site.post(COMPLETIONS, ask("gamma"))
        assert missing.status == 404
        assert missing.json["error"]["message"] == "The model `gamma` does not exist."
        assert missing.json["error"]["param"] == "model"
        proxy = site.world.proxy
        proxy.deployment.instances.ranks[1].status = Status.QUARANTINED
        proxy.deployment.driver.reopen()
        down = await site.post(COMPLETIONS, ask("beta"))
        assert (down.status, down.header(b"retry-after")) == (503, b"1")
        assert down.json["error"]["message"] == (
            "no decode rank that may serve the model `beta` is up"
        )
        assert (await site.post(COMPLETIONS, ask("alpha"))).status == 200
        # Still so once the list of the other one is forgotten.
        await asyncio.sleep(3.0)
        assert (await site.post(COMPLETIONS, ask("beta"))).status == 503
        proxy.deployment.instances.ranks[1].status = Status.UP
        proxy.deployment.driver.reopen()
        assert (await site.post(COMPLETIONS, ask("beta"))).status == 200
        only_where_served(site, TWO)

    play(scenario, engine_models=TWO)
    (line,) = [one for one in caplog.records if "different models" in one.getMessage()]
    assert line.fields["engines"].count("alpha") == line.fields["engines"].count("beta") == 2


def test_a_model_without_a_rank_is_refused_by_name(caplog: Any) -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        missing = await site.post(COMPLETIONS, ask("beta"))
        assert missing.status == 404
        assert missing.json["error"]["message"] == (
            "The model `beta` does not exist. No decode rank serves it."
        )
        # What a prefiller answers alone needs no rank.
        assert (await site.post("/tokenize", {"model": "beta", "prompt": "a"})).status == 200

    play(scenario, engine_models={**TWO, "decode/1": ("alpha",)})
    assert any(
        one.__dict__.get("fields", {}).get("without_rank") == "beta" for one in caplog.records
    )


@served(engine_models=TWO)
async def test_requests_of_a_model_whose_engines_are_gone_are_given_up(site: Site) -> None:
    await known(site)
    site.fleet.kill("decode/1")
    waiting = [site.send(COMPLETIONS, ask("beta")) for _ in range(3)]
    for one in waiting:
        assert (await one.end()).status in (502, 503)
    assert (await site.post(COMPLETIONS, ask("alpha"))).status == 200
    only_where_served(site, TWO)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
@served(engine_models=TWO)
async def test_what_one_engine_answers_alone_goes_to_one_of_its_model(
    site: Site, path: str
) -> None:
    await known(site)
    for model in ("alpha", "beta") * 3:
        values = {"model": model, "prompt": "a", "input": "a"}
        assert (await site.post(path, values)).status == 200
    only_where_served(site, TWO)
    assert (await site.post(path, {"prompt": "a", "input": "a"})).status == 200
    assert (await site.post(path, {"model": "gamma", "prompt": "a"})).status == 404
    assert (await site.post(path, b"[")).status == 400


@served(engine_models=TWO)
async def test_the_list_of_models_is_that_of_all_engines(site: Site) -> None:
    """It was now the one engine's, now the other's."""
    await known(site)
    for _ in range(3):
        listed = (await site.get("/v1/models")).json
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["alpha", "beta"]
    assert (await site.get("/v1/models/beta")).json["id"] == "beta"


def test_nothing_is_restricted_where_all_serve_the_same(caplog: Any) -> None:
    async def scenario(site: Site) -> None:
        await known(site)
        site.fleet.kill("prefill/1")
        routes = site.world.proxy.deployment.model_routes
        assert (routes.differ, routes.eligible("tiny"), routes.eligible("gamma")) == (
            False,
            None,
            None,
        )
        assert (await site.post(COMPLETIONS, ask("gamma"))).status == 404
        assert site.seen, "the engines say so"
        assert (await site.post(COMPLETIONS, ask("tiny"))).status == 200

    play(scenario)
    assert not [one for one in caplog.records if "different models" in one.getMessage()]
