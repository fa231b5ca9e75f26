"""Ray Serve with our request router, against its own, before emulated ranks: `scripts/checks ray` runs it."""

import asyncio
import os
import pickle
import random
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import Admit, RequestFinished
from balanceroute.proxy.core.policies import Policy, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")

# Of Ray's own code.
pytestmark = pytest.mark.filterwarnings("default")

POLICY = "br-h"
REQUESTS, AT_ONCE = 240, 48
GIVEN_UP = 8


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray Serve on loopback; it ends with the test."""
    from ray import serve  # noqa: PLC0415
    from tests.live.ray_fleet import JOURNAL  # noqa: PLC0415

    monkeypatch.setenv(JOURNAL, str(tmp_path / "journal"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / ".src"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Else it writes one to the home.
    ray.init(
        num_cpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    monkeypatch.setenv("TEST_RAY_URL", f"http://127.0.0.1:{port}")
    yield serve
    serve.shutdown()
    ray.shutdown()


def deployed(serve: Any, name: str, router: dict[str, Any]) -> Any:
    """Deploy a decode group behind an ingress at `/name`; return the actor of its barrier."""
    from ray.serve.config import RequestRouterConfig  # noqa: PLC0415
    from tests.live.ray_fleet import BATCH, RANKS, Decode, Group, Ingress  # noqa: PLC0415

    group = ray.remote(Group).options(name=name, num_cpus=0, max_concurrency=1000).remote()
    decode = serve.deployment(
        num_replicas=RANKS,
        max_ongoing_requests=BATCH,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_routing_stats_period_s=0.2, **router),
    )(Decode)
    ingress = serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})(
        Ingress
    )
    serve.run(ingress.bind(decode.bind(name)), name=name, route_prefix=f"/{name}")
    return group


def load() -> list[dict[str, Any]]:
    """Return short prompts and a few long ones, of a seed."""
    rng = random.Random(7)
    return [
        {
            "name": f"r{number}",
            "prompt": "x" * (rng.randint(3000, 6000) if rng.random() < 0.2 else 200),
            "max_tokens": rng.randint(10, 60),
        }
        for number in range(REQUESTS)
    ]


async def answers(name: str, requests: list[dict[str, Any]]) -> int:
    """Send requests, some at a time; return how many answers were right. Some clients hang up."""
    room = asyncio.Semaphore(AT_ONCE)
    url = f"{os.environ['TEST_RAY_URL']}/{name}"

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:  # noqa: S113

        async def one(body: dict[str, Any]) -> bool:
            async with room:
                answer = await client.post(url, json=body)
            return answer.text == f"begun {body['name']}: {body['max_tokens']}"

        async def hangs_up(number: int) -> None:
            body = {"name": f"gone{number}", "prompt": "x" * 100, "max_tokens": 5000}
            with pytest.raises(httpx.TimeoutException):
                await client.post(url, json=body, timeout=1.5 + number / 4)

        async with asyncio.TaskGroup() as tasks:
            for number in range(GIVEN_UP):
                tasks.create_task(hangs_up(number))
            sent = [tasks.create_task(one(body)) for body in requests]
    return sum(task.result() for task in sent)


async def figures(group: Any) -> dict[str, Any]:
    """Return what a group saw, once nothing is there any more."""
    async with asyncio.timeout(10):
        while True:
            told: dict[str, Any] = await group.figures.remote()
            if not told["held"]:
                return told
            await asyncio.sleep(0.1)


def policy_of(config: SchedulerConfig, serving: int, predictor: Survival) -> Policy:
    """Return the policy of a fleet."""
    limits = config.rank_batch_limits
    assert limits is not None
    inputs = PolicyInputs(
        *(config.ranks, max(limits), PolicySettings(), random.Random(0), predictor),
        serving=serving,
    )
    return make_policy(POLICY, inputs)


def replayed(journal: Path) -> tuple[dict[str, str], int]:
    """Feed a scheduler of our own what the router's was told, and assert that it answers the same.

    Returns:
        The replica of each request by its name, and how many requests are left.
    """
    predictor, scheduler = Survival(), None
    replicas: dict[int, str] = {}
    numbers: dict[str, int] = {}
    chosen: dict[int, str] = {}

    with journal.open("rb") as file:
        while file.peek(1):
            what, told = pickle.load(file)  # noqa: S301
            if isinstance(what, SchedulerConfig):
                policy = policy_of(what, told, predictor)
                if scheduler is None:
                    scheduler = Scheduler(what, policy)
                else:
                    scheduler.reconfigure(what, policy)
            elif isinstance(what, int):
                replicas = told
            elif isinstance(what, str):
                numbers[what] = told
            else:
                assert scheduler is not None
                now_ns, actions, learned = told
                if learned is not None:
                    assert isinstance(what, RequestFinished)
                    assert learned == max(1, scheduler.emitted(what.request))
                    predictor.observe(what.request, learned)
                assert scheduler.handle(what, now_ns=now_ns) == actions
                admitted = [one for one in actions if isinstance(one, Admit)]
                chosen |= {one.request: replicas[one.rank] for one in admitted}
    assert scheduler is not None
    scheduler.check()
    places = {name: chosen[number] for name, number in numbers.items() if number in chosen}
    return places, len(scheduler.requests)


def test_the_router_chooses_as_the_core_and_idles_less_than_rays_own(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.live.ray_fleet import BATCH, JournalRouter  # noqa: PLC0415

    ours = {
        "request_router_class": JournalRouter,
        "request_router_kwargs": {"policy": POLICY, "token_characters": 1.0},
    }
    idle, ran = {}, {}
    for name, router in (("ours", ours), ("power-of-two", {})):
        group = deployed(serve, name, router)
        assert asyncio.run(answers(name, load())) == REQUESTS
        told = asyncio.run(figures(group))
        assert told["most"] <= BATCH
        assert told["late_s"] < 1.0
        idle[name] = told["idle_tokens"] / told["capacity_tokens"]
        with capsys.disabled():
            row = f"{name}: idle {idle[name]:.3f}, {told['steps']} steps, most {told['most']}\n"
            sys.stdout.write(row)
        ran[name] = told["ran"]
        serve.delete(name)
    chosen, left = replayed(tmp_path / "journal")
    assert left == 0
    assert len(ran["ours"]) >= REQUESTS
    assert {name: chosen[name] for name in ran["ours"]} == ran["ours"]
    assert idle["ours"] < idle["power-of-two"]
