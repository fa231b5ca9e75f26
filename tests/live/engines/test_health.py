"""Health: who is quarantined, who is not, and who comes back when."""

import asyncio
import random
from dataclasses import replace

import pytest
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.health import Health, HealthSettings, Quarantine
from balanceroute.proxy.live.engines.instances import Role, Target

SETTINGS = HealthSettings(
    health_interval_s=5.0,
    health_timeout_s=2.0,
    quarantine_failures=3,
    backoff_s=1.0,
    backoff_max_s=8.0,
    stall_s=1.0,
)
DECODERS = [Target(Role.DECODE, f"http://d{number}:8000") for number in range(4)]
PREFILLER = Target(Role.PREFILL, "http://p:8000")
SOFT_FAULTS = [Fault.RESET, Fault.TIMEOUT, Fault.SERVER_ERROR, Fault.PROTOCOL]


async def never(_url: str) -> int:
    raise AssertionError("nothing is fetched here")


def unexpected(what: str, error: Exception) -> None:
    pytest.fail(f"{what}: {error!r}")


class Bench:
    """A Health with a clock that stands until it is moved."""

    def __init__(self, *targets: Target, settings: HealthSettings = SETTINGS) -> None:
        self.now_s = 100.0
        self.changes: list[tuple[Target, bool, str]] = []
        self.known: list[Target] = []
        self.health = Health(
            settings,
            fetch=never,
            on_change=lambda target, up, reason: self.changes.append((target, up, reason)),
            on_gone=lambda _: None,
            on_known=self.known.append,
            on_error=unexpected,
            clock=lambda: self.now_s,
            rng=random.Random(1),
        )
        for target in targets:
            self.health.add(target)

    def up(self) -> list[bool]:
        return [state.up for state in self.health.states()]

    def fail(self, target: Target, fault: Fault, times: int = 1) -> None:
        for _ in range(times):
            self.health.failed(target, fault)

    def probe(self, target: Target, fault: Fault | None) -> None:
        """Go to the next probe of a target and give it an outcome; those of others are good."""
        for _ in range(1000):
            due = self.tick()
            for one in due:
                self.health.probed(one, fault if one == target else None)
            if target in due:
                return
        raise AssertionError("it is never probed")

    def tick(self) -> list[Target]:
        self.now_s += 0.1
        return self.health.due()

    def wait(self, seconds: float) -> None:
        """Let time pass; every probe is good."""
        for _ in range(round(seconds * 10)):
            for one in self.tick():
                self.health.probed(one, None)


@pytest.mark.parametrize("fault", SOFT_FAULTS)
def test_a_fault_has_to_come_back_before_it_quarantines(fault: Fault) -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], fault, 2)
    assert bench.up() == [True] * 4
    bench.fail(DECODERS[0], fault)
    assert bench.up() == [False, True, True, True]
    assert bench.changes == [(DECODERS[0], False, fault.value)]


def test_a_success_in_between_starts_the_count_again() -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], Fault.SERVER_ERROR, 2)
    bench.health.succeeded(DECODERS[0])
    bench.fail(DECODERS[0], Fault.SERVER_ERROR, 2)
    assert bench.up() == [True] * 4


def test_a_refused_connection_quarantines_at_once() -> None:
    bench = Bench(*DECODERS)
    bench.health.failed(DECODERS[2], Fault.CONNECT, "connection refused")
    assert bench.changes == [(DECODERS[2], False, "connection refused")]
    assert bench.health.states()[2].reason == "connection refused"


def test_a_want_of_our_own_never_counts() -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], Fault.LOCAL, 100)
    assert bench.up() == [True] * 4
    bench.probe(DECODERS[0], Fault.LOCAL)
    assert bench.up() == [True] * 4


@pytest.mark.parametrize("fault", SOFT_FAULTS)
@pytest.mark.parametrize(("instances", "spared"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_no_more_than_half_of_a_role_is_quarantined_by_what_all_may_share(
    fault: Fault, instances: int, spared: int
) -> None:
    bench = Bench(*DECODERS[:instances])
    for target in DECODERS[:instances]:
        bench.fail(target, fault, 50)
    assert sum(bench.up()) == spared


def test_the_last_one_alive_is_not_given_up_for_its_errors() -> None:
    bench = Bench(*DECODERS)
    for target in DECODERS[:3]:
        bench.fail(target, Fault.CONNECT)
    bench.fail(DECODERS[3], Fault.SERVER_ERROR, 50)
    assert bench.up() == [False, False, False, True]
    bench.fail(DECODERS[3], Fault.CONNECT)
    assert bench.up() == [False] * 4


def test_roles_do_not_count_with_each_other() -> None:
    bench = Bench(PREFILLER, *DECODERS)
    bench.fail(PREFILLER, Fault.SERVER_ERROR, 50)
    assert bench.up() == [True] * 5


def test_an_instance_that_drains_no_longer_makes_others_expendable() -> None:
    bench = Bench(*DECODERS[:2])
    bench.health.remove(DECODERS[1])
    bench.fail(DECODERS[0], Fault.SERVER_ERROR, 50)
    assert bench.up() == [True]


def test_a_spared_instance_goes_when_another_is_back() -> None:
    bench = Bench(*DECODERS[:2])
    bench.fail(DECODERS[0], Fault.SERVER_ERROR, 3)
    bench.fail(DECODERS[1], Fault.SERVER_ERROR, 3)
    assert bench.up() == [False, True]
    bench.probe(DECODERS[0], None)
    assert bench.up() == [True, True]
    bench.fail(DECODERS[1], Fault.SERVER_ERROR)
    assert bench.up() == [True, False]


def test_a_failed_probe_counts_like_a_failed_request() -> None:
    bench = Bench(*DECODERS[:2])
    for failures in (1, 2, 3):
        bench.probe(DECODERS[0], Fault.SERVER_ERROR)
        assert bench.up()[0] == (failures < 3)


def test_a_good_probe_in_between_starts_the_count_of_probes_again() -> None:
    bench = Bench(*DECODERS)
    for fault in (Fault.TIMEOUT, Fault.TIMEOUT, None, Fault.TIMEOUT, Fault.TIMEOUT):
        bench.probe(DECODERS[0], fault)
    assert bench.up() == [True] * 4


def test_a_good_health_page_does_not_excuse_failing_requests() -> None:
    bench = Bench(*DECODERS)
    for _ in range(3):
        bench.fail(DECODERS[0], Fault.SERVER_ERROR)
        bench.probe(DECODERS[0], None)
    assert bench.changes[0][:2] == (DECODERS[0], False)


def test_one_good_probe_brings_an_instance_back() -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], Fault.CONNECT)
    bench.probe(DECODERS[0], None)
    assert bench.changes[1] == (DECODERS[0], True, "its health probe succeeded")
    assert bench.up() == [True] * 4


def test_requests_that_end_well_do_not_bring_an_instance_back() -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], Fault.CONNECT)
    bench.health.succeeded(DECODERS[0])
    bench.fail(DECODERS[0], Fault.CONNECT)
    assert bench.up() == [False, True, True, True]
    assert len(bench.changes) == 1


def test_who_came_back_is_on_trial() -> None:
    bench = Bench(*DECODERS)
    bench.fail(DECODERS[0], Fault.SERVER_ERROR, 3)
    bench.probe(DECODERS[0], None)
    bench.fail(DECODERS[0], Fault.SERVER_ERROR)
    assert not bench.up()[0]
    bench.probe(DECODERS[0], None)
    bench.health.succeeded(DECODERS[0])
    bench.fail(DECODERS[0], Fault.SERVER_ERROR)
    assert bench.up()[0]


@pytest.mark.parametrize("fault", [Fault.CONNECT, Fault.TIMEOUT, Fault.SERVER_ERROR])
def test_an_engine_that_is_away_is_probed_as_often_as_others(fault: Fault) -> None:
    bench = Bench(DECODERS[0])
    bench.fail(DECODERS[0], Fault.CONNECT)
    gaps_s = []
    for _ in range(6):
        before_s = bench.now_s
        bench.probe(DECODERS[0], fault)
        gaps_s.append(bench.now_s - before_s)
    for gap_s, expected_s in zip(gaps_s, [1, 5, 5, 5, 5, 5], strict=True):
        assert expected_s * 0.9 - 0.1 <= gap_s <= expected_s * 1.1 + 0.2


def test_an_engine_that_is_away_does_not_wait_for_the_next_of_rare_checks() -> None:
    bench = Bench(DECODERS[0], settings=replace(SETTINGS, health_interval_s=60.0))
    bench.fail(DECODERS[0], Fault.CONNECT)
    bench.probe(DECODERS[0], Fault.CONNECT)
    before_s = bench.now_s
    bench.probe(DECODERS[0], None)
    assert bench.now_s - before_s <= 8.0 * 1.1 + 0.2


def flap(bench: Bench, *, up_s: float) -> float:
    """Let an instance fail, recover and stay up; return how long it was gone."""
    bench.fail(DECODERS[0], Fault.CONNECT)
    before_s = bench.now_s
    bench.probe(DECODERS[0], None)
    gap_s = bench.now_s - before_s
    bench.wait(up_s)
    return gap_s


def test_a_flapping_instance_waits_longer_each_time() -> None:
    bench = Bench(DECODERS[0])
    gaps_s = [flap(bench, up_s=2.0) for _ in range(5)]
    for gap_s, expected_s in zip(gaps_s, [1, 2, 4, 8, 8], strict=True):
        assert expected_s * 0.9 - 0.1 <= gap_s <= expected_s * 1.1 + 0.2


def test_who_stayed_up_long_enough_starts_over() -> None:
    bench = Bench(DECODERS[0])
    assert [flap(bench, up_s=9.0) < 1.4 for _ in range(3)] == [True] * 3


def test_probes_are_spread() -> None:
    bench = Bench(*DECODERS)
    first: dict[Target, float] = {}
    again: dict[Target, float] = {}
    while len(again) < 4:
        for target in bench.tick():
            (again if target in first else first)[target] = bench.now_s
            bench.health.probed(target, None)
    assert len(set(first.values())) > 1
    for target in DECODERS:
        assert 4.4 <= again[target] - first[target] <= 5.7
    assert len({round(again[target] - first[target], 1) for target in DECODERS}) > 1


def test_a_target_is_probed_once_at_a_time() -> None:
    bench = Bench(DECODERS[0])
    while not bench.tick():
        pass
    assert not any(bench.tick() for _ in range(200))


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.CONNECT_TIMEOUT])
def test_timeouts_of_a_stall_are_nobodys_fault(fault: Fault) -> None:
    bench = Bench(*DECODERS)
    bench.health.due()
    bench.now_s += 30.0
    # Timers of requests fire before the tick that would notice the stall.
    for target in DECODERS:
        bench.fail(target, fault, 3)
    due = bench.health.due()
    assert due == DECODERS
    # Probes that had begun before, or right after while everything is late.
    bench.tick()
    for target in DECODERS:
        for _ in range(3):
            bench.health.probed(target, fault)
    assert bench.up() == [True] * 4
    # It does not last.
    for _ in range(30):
        bench.tick()
    bench.fail(DECODERS[0], fault, 3)
    assert bench.up() == [False, True, True, True]


def test_a_stall_does_not_excuse_a_refused_connection() -> None:
    bench = Bench(*DECODERS)
    bench.health.due()
    bench.now_s += 30.0
    bench.fail(DECODERS[0], Fault.CONNECT)
    assert bench.up() == [False, True, True, True]


def test_reports_about_the_unknown_are_ignored() -> None:
    bench = Bench(DECODERS[0])
    bench.health.failed(PREFILLER, Fault.CONNECT)
    bench.health.succeeded(PREFILLER)
    bench.health.remove(PREFILLER)
    assert bench.changes == []


class Engines:
    """Pages of health in virtual time."""

    def __init__(self) -> None:
        self.answers: dict[str, int | Fault | None] = {}  # None: it hangs.
        self.fetched: list[tuple[float, str]] = []

    async def fetch(self, url: str) -> int:
        self.fetched.append((asyncio.get_running_loop().time(), url))
        answer = self.answers.get(url, 200)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Fault):
            raise FetchError(answer, "no answer")
        assert answer is not None
        return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Fault.CONNECT, "connect: no answer"),
        (503, "status 503"),
        (302, "status 302"),
        (None, "timeout"),
    ],
)
def test_running_probes_quarantines_and_recovers(answer: int | Fault | None, reason: str) -> None:
    engines = Engines()
    changes: list[tuple[str, bool, str]] = []

    async def main(loop: VirtualLoop) -> None:
        health = Health(
            SETTINGS,
            fetch=engines.fetch,
            on_change=lambda target, up, reason: changes.append((target.url, up, reason)),
            on_gone=lambda _: None,
            on_known=lambda _: None,
            on_error=unexpected,
            clock=loop.time,
            rng=random.Random(2),
        )
        for target in DECODERS:
            health.add(target)
        task = loop.create_task(health.run())
        engines.answers = {"http://d0:8000/health": answer}
        await asyncio.sleep(30)
        engines.answers = {}
        await asyncio.sleep(30)
        assert not task.done()
        task.cancel()

    run(main, seed=1)
    assert changes == [
        ("http://d0:8000", False, reason),
        ("http://d0:8000", True, "its health probe succeeded"),
    ]
    assert {url for _, url in engines.fetched} == {f"{one.url}/health" for one in DECODERS}


def test_instances_removed_while_they_are_probed_are_not_missed() -> None:
    gate = asyncio.Event()
    fetched: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        async def fetch(url: str) -> int:
            fetched.append(url)
            # Of those due in the same tick this one is the first to begin.
            health.remove(DECODERS[1])
            await gate.wait()
            raise FetchError(Fault.CONNECT, "refused")

        health = Health(
            SETTINGS,
            fetch=fetch,
            on_change=lambda *_: pytest.fail("nothing changes"),
            on_gone=lambda _: None,
            on_known=lambda _: None,
            on_error=unexpected,
            clock=loop.time,
            rng=random.Random(2),
        )
        for target in DECODERS[:2]:
            health.add(target)
        await asyncio.sleep(2.0)  # Both are due at the first tick.
        task = loop.create_task(health.run())
        await asyncio.sleep(0.05)
        health.remove(DECODERS[0])
        health.add(DECODERS[0])
        gate.set()
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    run(main, seed=1)
    assert fetched == ["http://d0:8000/health"]


def test_who_is_convicted_is_quarantined_at_once_if_its_role_can_spare_it() -> None:
    first, second = DECODERS[:2]
    bench = Bench(first, second)
    assert bench.health.convict(first, "no KV", False)
    assert bench.changes == [(first, False, "no KV")]
    assert bench.health.convict(first, "no KV", False)
    assert not bench.health.convict(second, "no KV", False)
    assert bench.up() == [False, True]
    bench.health.remove(first)
    assert not bench.health.convict(first, "no KV", False)


def test_a_convict_on_trial_waits_longer_each_time_however_long_ago_it_came_back() -> None:
    first, second = DECODERS[:2]
    for again, grows in ((True, True), (False, False)):
        bench = Bench(first, second)
        waits = []
        for _ in range(3):
            assert bench.health.convict(first, "no KV", again)
            since_s = bench.now_s
            bench.probe(first, None)
            waits.append(bench.now_s - since_s)
            assert bench.health.is_on_trial(first)
            bench.wait(SETTINGS.backoff_max_s + 5.0)
        assert (waits[2] > 1.5 * waits[1] > 2.0 * waits[0]) == grows
        bench.health.succeeded(first)
        assert not bench.health.is_on_trial(first)


@pytest.mark.parametrize("where", ["fetch", "on_change"])
def test_whatever_a_probe_raises_ends_no_other_probe(where: str) -> None:
    """An exception of another type ended the whole process."""
    engines = Engines()
    asked: list[str] = []
    errors: list[tuple[str, str]] = []

    async def fetch(url: str) -> int:
        asked.append(url)
        if where == "fetch" and url.startswith("http://d0"):
            raise ZeroDivisionError("a defect")
        return await engines.fetch(url)

    def on_change(target: Target, up: bool, reason: str) -> None:
        if where == "on_change":
            raise ZeroDivisionError("a defect")

    async def main(loop: VirtualLoop) -> None:
        health = Health(
            SETTINGS,
            fetch=fetch,
            on_change=on_change,
            on_gone=lambda _: None,
            on_known=lambda _: None,
            on_error=lambda what, error: errors.append((what, str(error))),
            clock=loop.time,
            rng=random.Random(2),
        )
        for target in DECODERS:
            health.add(target)
        task = loop.create_task(health.run())
        if where == "on_change":
            engines.answers = {"http://d0:8000/health": Fault.CONNECT}
        await asyncio.sleep(30)
        assert not task.done()
        task.cancel()
        # It says nothing of the engine.
        assert next(state.up for state in health.states()) is (where == "fetch")

    run(main, seed=1)
    assert set(errors) == {("probe", "a defect")}
    for target in DECODERS:
        assert asked.count(f"{target.url}/health") >= 3


def test_a_quarantine_is_told_with_its_time_and_the_next_probe() -> None:
    bench = Bench(*DECODERS)
    assert bench.health.quarantines(1e9)[DECODERS[0]] == Quarantine()
    bench.health.failed(DECODERS[0], Fault.CONNECT, "refused")
    bench.now_s += 0.5
    told = bench.health.quarantines(1e9)[DECODERS[0]]
    assert (told.reason, told.since) == ("refused", 1e9 - 0.5)
    assert told.next_probe_s is not None
    # The back-off is 1 s, give or take a tenth.
    assert 0.4 <= told.next_probe_s <= 0.6
    bench.probe(DECODERS[0], None)
    told = bench.health.quarantines(2e9)[DECODERS[0]]
    assert (told.reason, told.next_probe_s) == ("refused", None)


def test_nothing_is_known_of_an_instance_before_its_first_good_probe() -> None:
    bench = Bench(PREFILLER, *DECODERS[:1])
    assert bench.known == []
    bench.probe(PREFILLER, None)
    assert PREFILLER in bench.known
    bench.wait(20.0)
    assert sorted(one.url for one in bench.known) == [DECODERS[0].url, PREFILLER.url]
    bench.health.remove(PREFILLER)
    bench.health.add(PREFILLER)
    assert len(bench.known) == 2
    bench.wait(2.0)
    assert bench.known[2:] == [PREFILLER]


def test_an_instance_is_known_when_it_is_quarantined() -> None:
    bench = Bench(*DECODERS[:2])
    bench.probe(DECODERS[0], Fault.CONNECT)
    assert DECODERS[0] in bench.known
    assert bench.up() == [False, True]


@pytest.mark.parametrize("fault", [Fault.SERVER_ERROR, Fault.TIMEOUT, Fault.LOCAL])
def test_the_last_instance_is_known_after_as_many_probes_as_quarantine_one(fault: Fault) -> None:
    bench = Bench(PREFILLER)
    began_s = bench.now_s
    for count in range(SETTINGS.quarantine_failures):
        assert bench.known == [], count
        bench.probe(PREFILLER, fault)
    assert bench.known == [PREFILLER]
    assert bench.up() == [True]  # The panic rule keeps it.
    # Sooner than the probes of one that is known.
    assert bench.now_s - began_s < SETTINGS.health_interval_s


def test_a_start_waits_for_the_first_probes_but_not_for_long() -> None:
    engines = Engines()
    engines.answers = {"http://d1:8000/health": None, "http://d2:8000/health": Fault.CONNECT}
    known: list[str] = []
    waited: list[float] = []

    async def main(loop: VirtualLoop) -> None:
        health = Health(
            replace(SETTINGS, health_timeout_s=30.0),
            fetch=engines.fetch,
            on_change=lambda *_: None,
            on_gone=lambda _: None,
            on_known=lambda target: known.append(target.url),
            on_error=unexpected,
            clock=loop.time,
            rng=random.Random(2),
        )
        for target in DECODERS[:3]:
            health.add(target)
        began_s = loop.time()
        await health.probe_new()
        waited.append(loop.time() - began_s)
        assert known == ["http://d0:8000", "http://d2:8000"]
        engines.answers = {}
        await health.probe_new()
        waited.append(loop.time() - began_s)

    run(main, seed=1)
    assert known[2:] == ["http://d1:8000"]
    assert waited == [2.0, 2.0]
    # Those that are known are not asked again.
    assert [url for _, url in engines.fetched[3:]] == ["http://d1:8000/health"]
