"""Aliases: a name that stands for several models, one of which answers."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.chaos.groups import GroupSettings
from tests.support.site import LARGE, SMALL, Exchanged, Site, play_groups, served_by_groups

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.model_choice import DoubleDqn, QNetwork, inputs_of

COMPLETIONS = "/v1/completions"
# Steps of 20 ms and of 50 ms, that grow with the load.
FAST = replace(SMALL, step_base_ns=20_000_000, step_ns_per_token=20_000.0)
SLOW = replace(LARGE, step_base_ns=50_000_000, step_ns_per_token=50_000.0)
GROUPS = {"small": GroupSettings(FAST), "large": GroupSettings(SLOW)}
GREEDY = '[alias.auto]\ngroups = ["small", "large"]\ntpot_ms = 80\n'
STATIC = '[alias.auto]\ngroups = ["small", "large"]\nchooser = "static"\n'
TASKS = (
    GREEDY
    + 'tasks = { chat = [0.7, 1.0], code = [0.5, 0.9] }\npaths = { "/v1/completions" = "code" }\n'
)


def ask(model: str = "auto", **values: object) -> dict[str, object]:
    return {"model": model, "prompt": "t1 t2", "max_tokens": 20, "ignore_eos": True} | values


def model_of(answer: Exchanged) -> str:
    """Return the model that answered, which header and body must say alike."""
    assert answer.status == 200, answer.body
    said = answer.chunks[0]["model"] if answer.events else answer.json["model"]
    header = answer.header(b"x-balanceroute-model")
    assert header is not None
    assert header.decode() == said
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages"])
@served_by_groups(groups=GROUPS, more=STATIC)
async def test_the_answer_says_which_model_gave_it(site: Site, path: str, stream: bool) -> None:
    talk = {"messages": [{"role": "user", "content": "t1 t2"}]}
    body = {COMPLETIONS: {"prompt": "t1 t2"}}
    values = {"model": "auto", "max_tokens": 4, "stream": stream, **body.get(path, talk)}
    answer = await site.post(path, values)
    assert answer.status == 200, answer.body
    assert answer.header(b"x-balanceroute-model") == b"large"
    assert b'"model":"large"' in answer.body.replace(b" ", b"")
    assert b"auto" not in answer.body
    assert {one.values["model"] for one in site.seen} == {"large"}


@served_by_groups(groups=GROUPS, more=STATIC)
async def test_only_requests_that_name_the_alias_are_routed(site: Site) -> None:
    for model in ("small", "large"):
        answer = await site.post(COMPLETIONS, ask(model))
        assert answer.json["model"] == model
        assert answer.header(b"x-balanceroute-model") is None
    assert model_of(await site.post(COMPLETIONS, ask())) == "large"


@served_by_groups(groups=GROUPS, more=STATIC)
async def test_aliases_are_listed(site: Site) -> None:
    await asyncio.sleep(2.0)
    listed = [one["id"] for one in (await site.get("/v1/models")).json["data"]]
    assert listed == ["auto", "small", "large"]
    assert (await site.get("/v1/models/auto")).json["owned_by"] == "balanceroute"
    alone = await site.post("/tokenize", {"model": "auto", "prompt": "t1"})
    assert alone.status == 400
    assert "stands for several models" in alone.json["error"]["message"]


@served_by_groups(groups=GROUPS, more=GREEDY)
async def test_greedy_leaves_what_the_large_model_cannot_do_in_time(site: Site) -> None:
    # Until steps of different loads were seen.
    for count in (1, 4):
        warm = [site.send(COMPLETIONS, ask(max_tokens=150, stream=True)) for _ in range(count)]
        for one in warm:
            await one.end()
    alone = await site.post(COMPLETIONS, ask(max_tokens=60))
    assert model_of(alone) == "large"
    prompt = " ".join(["t1"] * 300)
    sent = []
    for _ in range(12):
        sent.append(site.send(COMPLETIONS, ask(prompt=prompt, max_tokens=200, stream=True)))
        await asyncio.sleep(0.2)
    answered = Counter([model_of(await one.end()) for one in sent])
    assert answered["small"] >= 3
    assert answered["large"] >= 3
    # Once it is empty it is chosen again.
    assert model_of(await site.post(COMPLETIONS, ask())) == "large"


@pytest.mark.parametrize("more", [GREEDY, STATIC])
@served_by_groups("more", groups=GROUPS)
async def test_a_group_that_is_down_is_never_chosen(site: Site, more: str) -> None:
    large = site.world.fleets["large"]  # type: ignore[attr-defined]
    for engine in ("decode/0", "decode/1"):
        large.kill(engine)
    await asyncio.sleep(20.0)
    site.seen.clear()
    for _ in range(5):
        assert model_of(await site.post(COMPLETIONS, ask())) == "small"
    assert all(one.engine.startswith("small:") for one in site.seen)
    site.fleet.kill("prefill/0")
    await asyncio.sleep(20.0)
    nobody = await site.post(COMPLETIONS, ask())
    assert (nobody.status, nobody.header(b"retry-after")) == (503, b"1")
    await site.fleet.restore("prefill/0")
    for engine in ("decode/0", "decode/1"):
        await large.restore(engine)
    await asyncio.sleep(40.0)  # Longer than the longest time between two probes.
    assert model_of(await site.post(COMPLETIONS, ask())) == "large"


@served_by_groups(groups=GROUPS, more=STATIC)
async def test_a_drained_group_is_not_chosen(site: Site) -> None:
    for url in site.world.fleets["large"].decode_urls:  # type: ignore[attr-defined]
        order = {"role": "decode", "url": url}
        assert (await site.admin("/admin/instances/drain", order)).status == 200
    assert model_of(await site.post(COMPLETIONS, ask())) == "small"


def test_a_trained_network_chooses(tmp_path: Path) -> None:
    """Weights of which the value of the small model is the largest, whatever is asked."""
    network = QNetwork.drawn(inputs_of(2, 2), 8, 2, np.random.default_rng(0))
    for name in ("w2", "b2"):
        network.parameters[name][:] = 0
    network.parameters["b2"][0] = 1
    DoubleDqn(network, groups=2, tasks=2).write(tmp_path / "router.npz")

    async def scenario(site: Site) -> None:
        for _ in range(3):
            assert model_of(await site.post(COMPLETIONS, ask())) == "small"
        for url in site.fleet.decode_urls:
            order = {"role": "decode", "url": url}
            assert (await site.admin("/admin/instances/drain", order)).status == 200
        assert model_of(await site.post(COMPLETIONS, ask())) == "large"

    weights = f'chooser = "ddqn"\nweights = "{tmp_path}/router.npz"\n'
    play_groups(scenario, groups=GROUPS, more=TASKS + weights)


TENANTS = """
[[tenant]]
name = "t"
default = true
task = "chat"
"""


@pytest.mark.parametrize(
    ("path", "header", "tenants", "task"),
    [
        (COMPLETIONS, "", "", "code"),
        ("/v1/chat/completions", "", "", "chat"),
        (COMPLETIONS, "chat", "", "chat"),
        (COMPLETIONS, "", TENANTS, "chat"),
        (COMPLETIONS, "code", TENANTS, "code"),
    ],
)
@served_by_groups("tenants", groups=GROUPS, more=TASKS)
async def test_a_task_is_told_by_the_request_its_tenant_or_its_path(
    site: Site, path: str, header: str, tenants: str, task: str
) -> None:
    talk = {"messages": [{"role": "user", "content": "t1 t2"}]}
    values = ask() | (talk if "chat" in path else {})
    headers = [(b"x-task", header.encode())] if header else []
    assert (await site.post(path, values, headers=headers)).status == 200
    (record,) = site.world.ended
    assert (record.alias, record.task, record.model) == ("auto", task, "auto")


@served_by_groups(groups=GROUPS, more=TASKS)
async def test_an_unknown_task_is_refused(site: Site) -> None:
    answer = await site.post(COMPLETIONS, ask(), headers=[(b"x-task", b"poem")])
    assert answer.status == 400
    assert answer.json["error"]["message"] == (
        "X-Task is 'poem', must be given once and be one of chat, code"
    )


def test_a_tenant_that_may_use_the_alias_may_use_nothing_else() -> None:
    async def scenario(site: Site) -> None:
        assert model_of(await site.post(COMPLETIONS, ask())) == "large"
        assert (await site.post(COMPLETIONS, ask("large"))).status == 404

    tenants = '[[tenant]]\nname = "t"\ndefault = true\nmodels = ["auto"]\n'
    play_groups(scenario, groups=GROUPS, more=STATIC, tenants=tenants)


def test_a_large_body_is_routed_too() -> None:
    async def scenario(site: Site) -> None:
        prompt = "t1 " * 50_000
        answer = await site.post(COMPLETIONS, ask(prompt=prompt, max_tokens=2))
        assert model_of(answer) == "large"
        assert {one.values["model"] for one in site.seen} == {"large"}
        assert all(one.values["prompt"] == prompt for one in site.seen)

    long = EmulationSettings(model="large", prefillers=1, ranks=1, max_model_len=100_000)
    play_groups(
        scenario, groups={"small": GroupSettings(FAST), "large": GroupSettings(long)}, more=STATIC
    )
