"""Whose fault it is that KV caches cannot be pulled, and what becomes of it in a whole fleet."""

import asyncio
import itertools
import random
import re
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.lab.emulate import leases
from balanceroute.proxy.lab.emulate.leases import PullFailure
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import KvTransfers, Prefiller, Rank, Role, Target
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.client import Endpoint

COMPLETIONS = "/v1/completions"
WHY = re.compile("KV caches cannot be pulled: rank (.*?): (.*)")
NOWHERE = cast("Endpoint", None)


class Judge:
    """A judge over four prefillers and four ranks, whose verdicts are written down."""

    def __init__(self, *, enough: int = 3, spares: bool = True) -> None:
        # The names of who was found at fault, in order; "again" behind those on trial.
        self.convicted: list[str] = []
        self.counted: list[tuple[str, str, str]] = []
        self.passed = 0
        self.pulling: list[tuple[str, str]] = []  # Who pulls from whom at present.
        self.on_trial: set[str] = set()
        self.sides: dict[str, Any] = {}
        for i in range(4):
            target = Target(Role.PREFILL, f"p{i}")
            self.sides[f"p{i}"] = Prefiller(PrefillerId(i), f"p{i}", target, NOWHERE)
            self.sides[f"r{i}"] = Rank(RankId(i), f"r{i}", Target(Role.DECODE, f"r{i}"), NOWHERE)
        self._spares = spares
        self._requests = 0
        self.transfers = KvTransfers(
            enough,
            pulling=lambda: [(self.sides[p], self.sides[r]) for p, r in self.pulling],
            convict=self._convict,
            is_on_trial=lambda target: target.url in self.on_trial,
            count=lambda *names: self.counted.append(names),
            passed=self._pass,
        )

    def _convict(self, target: Target, reason: str, again: bool) -> bool:
        assert "cannot be pulled" in reason
        if self._spares:
            self.convicted.append(target.url + " again" * again)
        return self._spares

    def _pass(self) -> None:
        self.passed += 1

    def fail(self, *pairs: str, request: int | None = None) -> None:
        """Let pulls fail, each of a request of its own if nothing else is said."""
        for pair in pairs:
            self._requests += 1
            number = RequestId(self._requests if request is None else request)
            prefiller, rank = (self.sides[name] for name in pair.split())
            self.transfers.failed(number, prefiller, rank, Fault.SERVER_ERROR, "status 500")

    def succeed(self, *pairs: str) -> None:
        for pair in pairs:
            prefiller, rank = (self.sides[name] for name in pair.split())
            self.transfers.succeeded(prefiller, rank)


def test_a_prefiller_that_fails_with_several_ranks_is_at_fault() -> None:
    """Ranks were blamed for KV caches that a prefiller spoiled."""
    judge = Judge()
    judge.fail("p0 r0", "p0 r1")
    assert judge.convicted == []
    judge.fail("p0 r0")
    assert judge.convicted == ["p0"]
    assert judge.counted == [
        ("p0", "r0", "server_error"),
        ("p0", "r1", "server_error"),
        ("p0", "r0", "server_error"),
    ]


def test_a_rank_that_fails_with_several_prefillers_is_at_fault() -> None:
    judge = Judge()
    judge.fail("p0 r0", "p1 r0", "p0 r0")
    assert judge.convicted == ["r0"]


def test_of_a_pair_the_side_that_succeeds_with_others_is_not_at_fault() -> None:
    judge = Judge()
    for _ in range(3):
        judge.fail("p0 r0")
        judge.succeed("p1 r0")
    assert judge.convicted == ["p0"]
    judge = Judge()
    for _ in range(3):
        judge.fail("p0 r0")
        judge.succeed("p0 r1")
    assert judge.convicted == ["r0"]


def test_of_a_pair_the_side_whose_other_pulls_go_on_is_not_at_fault() -> None:
    judge = Judge()
    judge.pulling = [("p1", "r0")]
    judge.fail("p0 r0", "p0 r0", "p0 r0")
    assert judge.convicted == ["p0"]
    judge = Judge()
    judge.pulling = [("p0", "r1"), ("p1", "r1")]
    judge.fail("p0 r0", "p0 r0", "p0 r0")
    assert judge.convicted == ["r0"]


def test_of_a_pair_of_which_nothing_else_is_known_neither_is_at_fault() -> None:
    judge = Judge()
    judge.fail(*["p0 r0"] * 100)
    assert judge.convicted == []
    judge.pulling = [("p0", "r1"), ("p1", "r0")]
    judge.fail("p0 r0")
    assert len(judge.convicted) == 1


def test_a_request_that_fails_everywhere_convicts_nobody() -> None:
    judge = Judge(enough=2)
    judge.fail("p0 r0", "p0 r1", "p0 r2", "p1 r0", "p1 r1", request=7)
    assert judge.convicted == []


def test_a_success_wipes_the_slate_of_both_sides() -> None:
    judge = Judge()
    judge.fail("p0 r0", "p0 r1")
    judge.succeed("p0 r2")
    judge.fail("p0 r0")
    assert judge.convicted == []


def test_who_is_on_trial_is_at_fault_at_its_first_failure() -> None:
    judge = Judge()
    judge.fail("p0 r0", "p0 r1", "p0 r2")
    assert judge.sides["p0"].kv_trial
    judge.fail("p0 r3")
    assert judge.convicted == ["p0", "p0 again"]
    judge.succeed("p0 r3")
    assert not judge.sides["p0"].kv_trial
    assert judge.passed == 1
    judge.on_trial = {"r1"}
    judge.fail("p1 r1")
    assert judge.convicted == ["p0", "p0 again", "r1 again"]


def test_who_cannot_be_spared_is_not_on_trial_either() -> None:
    judge = Judge(spares=False)
    judge.fail("p0 r0", "p0 r1", "p0 r2")
    assert judge.convicted == []
    assert not judge.sides["p0"].kv_trial


# A whole fleet.


def body(i: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"t{i} u v",
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": stream,
    }


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let ranks fail to pull from the prefillers whose engine ids are put in here.

    After so many seconds. All that anyone else sees of these prefillers is well.
    """
    failing: dict[str, float] = {}
    claim = leases.claim

    def claimed(connector: Any, params: Any, *rest: Any) -> Any:
        after_s = failing.get(params.get("remote_engine_id"))
        return claim(connector, params, *rest) if after_s is None else PullFailure(after_s)

    monkeypatch.setattr("balanceroute.proxy.lab.emulate.decoder.claim", claimed)
    return failing


async def load(site: Site, count: int, *, stream: bool, per_s: float = 20.0) -> list[Exchanged]:
    """Send requests at random times, streamed or not, and wait for all answers."""
    rng = random.Random(3)
    sent = []
    for i in range(count):
        sent.append(site.send(COMPLETIONS, body(i, stream=stream)))
        await asyncio.sleep(rng.expovariate(per_s))
    for exchange in sent:
        await exchange.end()
    return sent


async def statuses(site: Site) -> dict[str, str]:
    """Return what the admin page says of each engine, by its name."""
    page = (await site.admin("/admin/instances")).json["instances"]
    names = [*(f"prefill/{i}" for i in range(2)), *(f"decode/{i}" for i in range(4))]
    by_url = {row["url"]: row["status"] for row in page}
    return {name: by_url[site.fleet.engine(name).url] for name in names}


def quarantines(page: str, role: str) -> float:
    """Return how often engines of a role were quarantined, as the metrics tell."""
    sample = re.compile(
        rf'^balanceroute_quarantines_total{{role="{role}",url=".*"}} (.*)$', re.MULTILINE
    )
    counts = sample.findall(page)
    assert counts
    return sum(map(float, counts))


@pytest.mark.parametrize("after_s", [0.0, 2.0])
@pytest.mark.parametrize("stream", [False, True])
@served(ranks=4)
async def test_a_prefiller_whose_kv_caches_cannot_be_pulled_costs_no_client_an_answer(
    site: Site, spoiled: dict[str, float], *, stream: bool, after_s: float
) -> None:
    """46 of 120 clients got 500, and decode ranks were quarantined for it."""
    bad = site.fleet.engine("prefill/0")
    spoiled[bad.engine_id] = after_s
    exchanges = await load(site, 120, stream=stream)
    assert [one.status for one in exchanges] == [200] * 120
    (row,) = [
        row
        for row in (await site.admin("/admin/instances")).json["instances"]
        if row["url"] == bad.url
    ]
    rank, reason = WHY.fullmatch(row["reason"]).groups()  # type: ignore[union-attr]
    assert rank in {site.fleet.engine(f"decode/{i}").url for i in range(4)}
    assert reason == "status 500: Internal server error; the log of that rank says why"
    assert all(one.done for one in exchanges if one.events)
    assert {record.outcome for record in site.world.ended} == {Outcome.OK}
    by_name = await statuses(site)
    page = (await site.get("/metrics")).body.decode()
    assert quarantines(page, "prefill") > 0
    assert quarantines(page, "decode") == 0
    assert {by_name[name] for name in by_name if name != "prefill/0"} == {"up"}
    failures = [line for line in page.splitlines() if "kv_transfer_failures_total{" in line]
    assert failures
    assert all(f'prefiller="{bad.url}"' in line for line in failures)


@served(ranks=4)
async def test_a_convicted_prefiller_comes_back_by_ever_rarer_trials_that_cost_no_answer(
    site: Site, spoiled: dict[str, float]
) -> None:
    """One good health probe brought it back, only to fail again and again."""
    bad = site.fleet.engine("prefill/0")
    spoiled[bad.engine_id] = 0.0
    await load(site, 60, stream=True)
    site.seen.clear()
    exchanges = await load(site, 400, stream=True, per_s=4.0)
    assert [one.status for one in exchanges] == [200] * 400
    trials = [one.at_s for one in site.received("prefill/0", COMPLETIONS)]
    # In 100 s, with pauses of 1, 2, 4, 8, 16 and 30 s.
    assert 3 <= len(trials) <= 8
    pauses = [b - a for a, b in itertools.pairwise(trials)]
    assert all(b > 1.2 * a for a, b in itertools.pairwise(pauses) if a < 20.0)
    assert (await statuses(site))["decode/0"] == "up"
    spoiled.clear()
    await asyncio.sleep(40.0)
    site.seen.clear()
    await load(site, 60, stream=True)
    assert (await statuses(site))["prefill/0"] == "up"
    assert len(site.received("prefill/0", COMPLETIONS)) >= 10


@served(ranks=4)
async def test_a_rank_that_can_pull_from_nobody_is_quarantined_and_no_prefiller(site: Site) -> None:
    site.fleet.faults.set("decode/0", status_500=1.0)
    exchanges = await load(site, 120, stream=False)
    assert [one.status for one in exchanges] == [200] * 120
    page = (await site.get("/metrics")).body.decode()
    assert quarantines(page, "decode") > 0
    assert quarantines(page, "prefill") == 0
