"""Choices of ranks for a router of another make: what each call asks of the core, and what is given back."""

import random
from typing import Any

import pytest

from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import (
    Admit,
    RequestArrived,
    RequestFinished,
    RequestId,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.proxy.live.replica_choices import MOST_TOKENS, ReplicaChoices, ReplicaSettings


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def choices_of(clock: Clock, slots: dict[str, int], **settings: Any) -> ReplicaChoices:
    found = ReplicaChoices(ReplicaSettings.of(settings), clock)
    found.replicas(slots)
    return found


def held(choices: ReplicaChoices) -> list[int]:
    choices.scheduler.check()
    return [int(one) for one in choices.scheduler.ledger.bound]


@pytest.mark.parametrize("policy", ["fifo", "br-0", "br-h"])
def test_nobody_has_more_than_its_slots_and_all_is_given_back(clock: Clock, policy: str) -> None:
    rng, slots = random.Random(3), {"a": 2, "b": 3, "c": 1}
    choices = choices_of(clock, slots, policy=policy)
    running: dict[RequestId, str] = {}
    for number in range(200):
        choices.ask(rng.choice([10, 20, 3000]), rng.choice([None, 5]))
        if number % 3:
            over = rng.choice([*running, RequestId(10**6)])
            choices.ended(over)
            choices.ended(over)  # Told again, it changes nothing.
            running.pop(over, None)
        for request, name in choices.decide():
            assert name is not None
            running[request] = name
            choices.began(request)
        clock.now_s += 0.1
        for name, most in slots.items():
            assert list(running.values()).count(name) <= most
    assert held(choices) == [2, 3, 1]
    for request in list(choices.scheduler.requests):
        choices.cancelled(request)
    assert held(choices) == [0, 0, 0]
    assert not choices._progress


def test_the_choices_are_those_of_a_scheduler_alone(clock: Clock) -> None:
    rng, slots = random.Random(5), {"a": 4, "b": 4, "c": 4}
    choices = choices_of(clock, slots, policy="br-0")
    inputs = PolicyInputs(3, 4, PolicySettings(), random.Random(0), Survival(), serving=3)
    alone = Scheduler(SchedulerConfig(ranks=3, batch_limit=4), make_policy("br-0", inputs))
    running: list[RequestId] = []
    for _ in range(150):
        tokens = rng.choice([50, 60, 4000])
        now_ns = round(clock.now_s * 1e9)
        alone.handle(
            RequestArrived(choices.ask(tokens), Ticket(tokens, prefill=False)), now_ns=now_ns
        )
        if len(running) > 8:
            over = running.pop(rng.randrange(len(running)))
            choices.ended(over)
            alone.handle(RequestFinished(over), now_ns=now_ns)
        told = choices.decide()
        said = [one for one in alone.handle(Tick(), now_ns=now_ns) if isinstance(one, Admit)]
        assert told == [(one.request, "abc"[one.rank]) for one in said]
        running += [request for request, _ in told]
        clock.now_s += 0.01


def test_who_waits_too_long_is_refused(clock: Clock) -> None:
    choices = choices_of(clock, {"a": 1}, wait_s=2.0)
    first, second = choices.ask(10), choices.ask(10)
    assert choices.decide() == [(first, "a")]
    clock.now_s += 2.1
    assert choices.decide() == [(second, None)]
    choices.began(second)
    choices.refused(second)
    choices.cancelled(second)
    assert held(choices) == [1]


def test_a_replica_that_did_not_take_it_is_avoided(clock: Clock) -> None:
    choices = choices_of(clock, {"a": 1, "b": 1})
    request = choices.ask(10)
    ((_, name),) = choices.decide()
    choices.refused(request)
    ((_, other),) = choices.decide()
    assert {name, other} == {"a", "b"}
    choices.began(request)
    choices.refused(request)  # Too late.
    assert sum(held(choices)) == 1


def test_replicas_come_and_go(clock: Clock) -> None:
    choices = choices_of(clock, {})
    request = choices.ask(10)
    assert choices.decide() == []
    choices.replicas({"a": 1})
    assert choices.decide() == [(request, "a")]
    # Its number is not another's while a request is there.
    choices.replicas({"b": 1})
    later = choices.ask(10)
    assert choices.decide() == [(later, "b")]
    assert held(choices) == [1, 1]
    choices.ended(request)
    choices.replicas({"b": 1, "c": 2})
    assert held(choices) == [0, 1]
    more = [choices.ask(10) for _ in range(3)]
    assert choices.decide() == [(more[0], "c"), (more[1], "c")]


def test_many_roll_outs_take_no_more_ranks_than_replicas_at_a_time(clock: Clock) -> None:
    choices = choices_of(clock, {})
    for number in range(100):
        choices.replicas({f"{number}": 2, f"{number + 1}": 2})
        request = choices.ask(10)
        assert choices.decide()
        choices.ended(request)
    assert len(held(choices)) <= 3


def test_progress_follows_from_what_a_replica_has_made(clock: Clock) -> None:
    choices = choices_of(clock, {"a": 2})
    one, two = choices.ask(100), choices.ask(100, max_tokens=15)
    choices.decide()
    choices.output("a", 1000)
    choices.began(one)
    choices.began(two)
    for made in (1000, 1040, 1080):
        clock.now_s += 1.0
        choices.output("a", made)
        choices.output("nobody", made)
    choices.decide()
    # 40 rounds of both, of which one of them may have 15.
    assert choices.scheduler.emitted(one) == 40
    assert choices.scheduler.emitted(two) == 15
    # A counter that begins again takes nothing back.
    choices.output("a", 3)
    choices.decide()
    assert choices.scheduler.emitted(one) == 40
    choices.ended(one)
    assert list(choices._predictor._history) == [40]


@pytest.mark.parametrize(("before", "between"), [(False, False), (False, True), (True, False)])
def test_what_nobody_counts_teaches_nothing(clock: Clock, before: bool, between: bool) -> None:
    choices = choices_of(clock, {"a": 2})
    request = choices.ask(100)
    choices.decide()
    if before:
        choices.output("a", 7)
    choices.began(request)
    clock.now_s += 1.0
    if between:
        choices.output("a", 50)
    choices.ended(request)
    assert not choices._predictor._history


def test_without_its_policy_the_oldest_goes_first(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    choices = choices_of(clock, {"a": 1, "b": 1})
    requests = [choices.ask(10) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(choices.scheduler.policy), "dispatch", lambda *_: 1 // 0)
        assert {request for request, _ in choices.decide()} == set(requests[:2])
    assert "the policy failed" in caplog.text
    choices.ended(requests[0])
    assert [request for request, _ in choices.decide()] == requests[2:]


def test_sizes_are_bounded(clock: Clock) -> None:
    choices = choices_of(clock, {"a": 0, "b": 10**12}, batch=2)
    for tokens, most in ((-5, -1), (0, 0), (10**30, 10**30)):
        choices.ask(tokens, most)
    assert len(choices.decide()) == 3
    assert max(choices.scheduler.ledger.loads) <= 2 * MOST_TOKENS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "random"),
        ("policy", None),
        ("batch", 0),
        ("batch", True),
        ("batch", "8"),
        ("most_waiting", 10**6),
        ("wait_s", -1.0),
        ("wait_s", float("nan")),
        ("answer_limit_s", float("inf")),
        ("window", 3),
    ],
)
def test_settings_have_ranges(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ReplicaSettings.of({name: value})
