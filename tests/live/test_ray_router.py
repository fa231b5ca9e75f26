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
from balanceroute.proxy.core.events import Admit, RankId, RequestFinished
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
    """A Ray of its own, with HTTP on loopback; it ends with the test."""
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


# Without a cluster: what Ray asks and tells, by hand.


class Replica:
    """What a router sees of a replica."""

    def __init__(self, name: str, slots: int = 1) -> None:
        from ray.serve.request_router import ReplicaID  # noqa: PLC0415

        self.replica_id = ReplicaID(name, deployment_id=deployment())
        self.max_ongoing_requests = slots
        self.routing_stats: dict[str, object] = {}
        self.held = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        del deadline_s
        return self.held


class Hand:
    """A router with replicas, and the calls that Ray makes."""

    def __init__(self, *replicas: Replica, **settings: object) -> None:
        from ray.serve._private.common import DeploymentHandleSource  # noqa: PLC0415

        from balanceroute.proxy.live.ray_router import BalanceRouter  # noqa: PLC0415

        self.router = BalanceRouter(
            deployment(), DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(**settings)
        self.now_s = 50.0
        self.router._clock = lambda: self.now_s
        self.router._choices._clock = lambda: self.now_s
        self.router.update_replicas(list(replicas))

    def ask(self, name: str = "one") -> tuple[Any, "asyncio.Task[Any]"]:
        from ray.serve._private.common import RequestMetadata  # noqa: PLC0415
        from ray.serve.request_router import PendingRequest  # noqa: PLC0415

        pending = PendingRequest(
            args=[{"prompt": "x" * 40, "max_tokens": 5}],
            kwargs={},
            metadata=RequestMetadata(request_id=name, internal_request_id=name),
        )
        return pending, asyncio.create_task(self.router._choose_replica_for_request(pending))

    def over(self, replica: Replica, name: str = "one") -> None:
        self.router.on_request_completed(replica.replica_id, name)

    async def nothing_left(self) -> None:
        await asyncio.sleep(0)
        router = self.router
        assert not [*router._by_future, *router._by_number, *router._chosen]
        assert not router._choices.scheduler.requests


def deployment() -> Any:
    from ray.serve._private.common import DeploymentID  # noqa: PLC0415

    return DeploymentID(name="decode")


async def soon(what: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(5):
        return await what


async def still(*whats: "asyncio.Task[Any]") -> None:
    await asyncio.sleep(0.05)
    assert not [what for what in whats if what.done()]


def by_hand(scenario: Any) -> Any:
    def test() -> None:
        asyncio.run(scenario())

    return test


@by_hand
async def test_it_waits_for_a_slot() -> None:
    replica = Replica("a")
    hand = Hand(replica)
    pending, first = hand.ask()
    assert await soon(first) is replica
    hand.router.on_request_routed(pending, replica.replica_id, None)
    _, second = hand.ask("two")
    _, third = hand.ask("three")
    await still(second, third)
    hand.over(replica)
    assert await soon(second) is replica
    hand.over(replica)  # Nobody's any more.
    await still(third)
    hand.over(replica, "two")
    await soon(third)
    hand.over(replica, "three")
    await hand.nothing_left()


@by_hand
async def test_who_gives_up_leaves_nothing() -> None:
    replica = Replica("a")
    hand = Hand(replica)
    _, first = hand.ask()
    await soon(first)
    _, second = hand.ask("two")
    _, third = hand.ask("three")
    await still(second, third)
    second.cancel()
    await still(third)
    hand.over(replica)
    assert await soon(third) is replica
    hand.over(replica, "three")
    await hand.nothing_left()


@by_hand
async def test_without_a_replica_it_waits_for_one() -> None:
    hand = Hand()
    _, first = hand.ask()
    await still(first)
    replica = Replica("a")
    hand.router.update_replicas([replica])
    assert await soon(first) is replica
    hand.router.on_replica_actor_died(replica.replica_id)
    _, second = hand.ask("two")
    await still(second)
    hand.over(replica)
    second.cancel()
    await still()
    await hand.nothing_left()


@by_hand
async def test_a_replica_that_others_fill_is_left() -> None:
    replicas = [Replica("a"), Replica("b")]
    hand = Hand(*replicas)
    replicas[0].held = 1
    _, first = hand.ask()
    assert await soon(first) is replicas[1]
    hand.over(replicas[1])
    await hand.nothing_left()


@by_hand
async def test_what_a_replica_rejects_is_asked_for_again_under_the_same_id() -> None:
    replica = Replica("a", slots=2)
    hand = Hand(replica)
    pending, first = hand.ask()
    await soon(first)
    again = asyncio.create_task(hand.router._choose_replica_for_request(pending, is_retry=True))
    assert await soon(again) is replica
    hand.over(replica)  # Of the first, told late.
    assert len(hand.router._by_number) == 1
    hand.over(replica)
    await hand.nothing_left()


@by_hand
async def test_who_waits_too_long_gets_an_error() -> None:
    from ray.serve.exceptions import BackPressureError  # noqa: PLC0415

    replica = Replica("a")
    hand = Hand(replica, wait_s=3)
    _, first = hand.ask()
    await soon(first)
    _, second = hand.ask("two")
    await still(second)
    hand.now_s += 3.5
    with pytest.raises(BackPressureError):
        await soon(second)
    hand.over(replica)
    await hand.nothing_left()


@by_hand
async def test_what_nobody_sends_or_ends_is_over() -> None:
    replica = Replica("a", slots=2)
    hand = Hand(replica, answer_limit_s=100)
    _, first = hand.ask()
    await soon(first)
    pending, second = hand.ask("two")
    second.cancel()
    asked = asyncio.create_task(hand.router.choose_replicas([replica], pending))
    pending.future = asyncio.Future()  # Nobody sets it: its caller asks for a place only.
    assert await soon(asked) == [[replica]]
    hand.now_s += 31
    hand.router._tick()
    assert len(hand.router._by_number) == 1
    hand.now_s += 70
    hand.router._tick()
    await hand.nothing_left()


@by_hand
async def test_a_fault_of_its_own_is_an_error_of_its_caller() -> None:
    replica = Replica("a")
    hand = Hand(replica)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand.router._choices, "decide", lambda: 1 // 0)
        _, first = hand.ask()
        with pytest.raises(ZeroDivisionError):
            await soon(first)
    await hand.nothing_left()
    _, second = hand.ask("two")
    assert await soon(second) is replica
    hand.over(replica, "two")


@by_hand
async def test_stats_of_any_kind_are_read() -> None:
    replica = Replica("a", slots=9)
    hand = Hand(replica)
    for told in (None, "many", float("nan"), float("inf"), -1, True, 5, 10**400):
        replica.routing_stats = {"output_tokens": told}
        hand.now_s += 1
        hand.router._tick()
    assert hand.router._choices._paces[RankId(0)].output_tokens == 5


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([], (1, None)),
        ([{"prompt": "x" * 9, "max_tokens": 4}], (3, 4)),
        ([{"prompt": [5] * 9, "max_tokens": "4"}], (9, None)),
        ([{"prompt": [[5] * 9, [6] * 2], "max_tokens": -4}], (11, None)),
        ([{"prompt": ""}], (1, None)),
        ([None, {"messages": [{"content": "x" * 8}, {"content": None}]}], (2, None)),
        ([{"messages": [{"content": [{"text": "x" * 8}, {"image": 5}]}]}], (2, None)),
        ([{"messages": 5.5, "max_completion_tokens": 7}], (1, 7)),
    ],
)
def test_sizes_follow_from_what_is_asked(given: Any, sizes: tuple[int, int | None]) -> None:
    from balanceroute.proxy.live import ray_router  # noqa: PLC0415

    assert ray_router.sizes(given, 4.0) == sizes
