"""Engines of two versions behind one proxy: in virtual time, with emulated engines that compare them."""

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, answering, play, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

COMPLETIONS = "/v1/completions"
OLD, NEW = "0.32.0", "0.33.0"
REFUSAL = 'NIXL refuses the pair ("NIXL compatibility hash mismatch")'
UNFIT = (
    "no engine of each role is up that fits one of the other: decode engines and prefillers have "
    f"vLLM {NEW} and {OLD}: {REFUSAL}. Start both roles with the same version, weights and flags"
)
FOUR: dict[str, Any] = {"prefillers": 2, "ranks": 2}


def body(number: int, tokens: int = 8) -> dict[str, object]:
    return {"model": "tiny", "prompt": f"prompt {number}", "max_tokens": tokens, "stream": True}


async def all_served(site: Site, count: int) -> None:
    exchanges = [site.send(COMPLETIONS, body(number)) for number in range(count)]
    for exchange in exchanges:
        assert (await exchange.end()).done


def by_engine(site: Site) -> dict[str, int]:
    """Return how many requests each engine was given."""
    counts: dict[str, int] = {}
    for one in site.received("", COMPLETIONS):
        counts[one.engine] = counts.get(one.engine, 0) + 1
    return counts


def mixed_pairs(site: Site) -> int:
    return int(site.fleet.stats()["mixed_pairs"])


async def rows(site: Site) -> dict[str, dict[str, Any]]:
    answer = await site.admin("/admin/instances")
    names = {engine.url: engine.name for engine in site.fleet.engines}
    return {names[row["url"]]: row for row in answer.json["instances"]}


async def order(site: Site, path: str, engine: str) -> Exchanged:
    url, role = site.fleet.engine(engine).url, engine.partition("/")[0]
    return await site.admin(path, {"role": role, "url": url})


def test_two_versions_serve_side_by_side() -> None:
    versions = {"prefill/1": NEW, "decode/1": NEW}

    async def scenario(site: Site) -> None:
        await all_served(site, 20)
        assert mixed_pairs(site) == 0
        assert by_engine(site).keys() == {"prefill/0", "prefill/1", "decode/0", "decode/1"}
        pulled = {one["prefiller"] + one["rank"] for one in logged(site)}
        assert len(pulled) == 2
        told = await rows(site)
        assert {name: row["version"] for name, row in told.items()} == {
            "prefill/0": OLD,
            "prefill/1": NEW,
            "decode/0": OLD,
            "decode/1": NEW,
        }
        assert not any("unfit" in row for row in told.values())

    play(scenario, engine_versions=versions)


def logged(site: Site) -> list[dict[str, str]]:
    return [{"prefiller": one.prefiller, "rank": one.rank} for one in site.world.ended]


def test_an_engine_that_fits_none_takes_nothing_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        await all_served(site, 10)
        assert by_engine(site).keys() == {"prefill/0", "decode/0", "decode/1"}
        told = await rows(site)
        assert told["prefill/1"]["unfit"] == f"have vLLM {OLD} and {NEW}: {REFUSAL}"
        assert told["prefill/1"]["status"] == "up"
        assert [name for name, row in told.items() if "unfit" in row] == ["prefill/1"]
        state = await site.state()
        assert [one["open"] for one in state["prefillers"]] == [True, False]

    play(scenario, engine_versions={"prefill/1": NEW})
    (line,) = [one for one in caplog.records if "do not fit" in one.message]
    assert line.fields["reason"].endswith(REFUSAL)  # type: ignore[attr-defined]


@served(engine_versions={"decode/0": NEW, "decode/1": NEW})
async def test_where_nothing_fits_requests_are_refused_at_once(site: Site) -> None:
    answer = await site.post(COMPLETIONS, body(0))
    assert (answer.status, by_engine(site)) == (503, {})
    assert answer.json["error"]["message"] == UNFIT
    assert (await site.admin("/ready")).status == 503


def test_an_operator_may_pair_them_anyway() -> None:
    versions = {"decode/0": NEW, "decode/1": NEW}

    async def scenario(site: Site) -> None:
        await site.post(COMPLETIONS, body(0))
        assert mixed_pairs(site) > 0, "the engines still refuse"
        assert "version" not in (await rows(site))["decode/0"]

    play(scenario, engine_versions=versions, flags={"check_pairs": False})


@served(engine_versions={"decode/0": NEW, "decode/1": NEW}, connector="mooncake")
async def test_mooncake_does_not_compare_versions(site: Site) -> None:
    await all_served(site, 6)
    assert not any("unfit" in row for row in (await rows(site)).values())


@pytest.mark.parametrize(
    ("status", "page"),
    [
        (404, b"{}"),
        (200, b'{"version":"0.33\xff"}'),
        (200, b'{"\xff":1}'),
        (200, b'{"a":' + b"[" * 5_000),
    ],
    ids=["missing", "no UTF-8", "no UTF-8 in a key", "deep"],
)
@served(engine_versions={"decode/1": NEW})
async def test_an_engine_that_tells_nothing_is_paired(site: Site, status: int, page: bytes) -> None:
    site.handlers[b"/version"] = answering(status, page, kind=None)
    site.fleet.kill("decode/1")
    await asyncio.sleep(10.0)
    await site.fleet.restore("decode/1")
    await asyncio.sleep(40.0)
    await all_served(site, 10)
    assert by_engine(site)["decode/1"]


@served()
async def test_an_engine_that_comes_back_takes_nothing_before_it_was_asked(site: Site) -> None:
    asked: list[str] = []

    def slow(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        asked.append(engine)
        assert engine == "decode/1"
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, reply.send, 200, [], b'{"version":"0.33.0"}')

    site.fleet.kill("decode/1")
    await asyncio.sleep(10.0)
    site.handlers[b"/version"] = slow
    await site.fleet.restore("decode/1")
    await site.until(lambda: bool(asked))
    await all_served(site, 10)
    await asyncio.sleep(2.0)
    await all_served(site, 10)
    assert "decode/1" not in by_engine(site)
    assert (await rows(site))["decode/1"]["unfit"]


@pytest.mark.parametrize("page", [b"/version", b"/metrics"])
@served(prefillers=1, ranks=1, engine_versions={"decode/0": NEW})
async def test_an_engine_too_busy_to_tell_takes_nothing_until_it_does(
    site: Site, page: bytes
) -> None:
    """Once a page did not come within 2 s, an engine of another version was given requests for a minute."""
    late: list[Reply] = []

    def busy(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        late.append(reply)
        if len(late) == 2:
            del site.handlers[page]

    await order(site, "/admin/instances/drain", "decode/0")
    site.handlers[page] = busy
    await order(site, "/admin/instances", "decode/0")
    answers = [await site.post(COMPLETIONS, body(number)) for number in range(3)]
    await asyncio.sleep(6.0)
    answers += [await site.post(COMPLETIONS, body(number)) for number in range(3)]
    assert len(late) == 2
    assert [one.status for one in answers] == [503] * 6
    assert {one.json["error"]["message"] for one in answers[3:]} == {UNFIT}
    assert mixed_pairs(site) == 0


@served(prefillers=1, ranks=1, engine_versions={"decode/0": NEW})
async def test_what_an_engine_told_holds_while_it_is_too_busy_to_tell(site: Site) -> None:
    site.handlers[b"/version"] = lambda engine, request, reply: None
    await asyncio.sleep(90.0)
    assert (await site.post(COMPLETIONS, body(0))).json["error"]["message"] == UNFIT
    assert (await rows(site))["decode/0"]["version"] == NEW


@served()
async def test_an_engine_that_never_tells_is_paired_in_the_end(site: Site) -> None:
    site.fleet.kill("decode/1")
    await asyncio.sleep(10.0)
    site.handlers[b"/version"] = lambda engine, request, reply: None
    await site.fleet.restore("decode/1")
    await asyncio.sleep(40.0)
    await all_served(site, 10)
    assert by_engine(site)["decode/1"]


@served()
async def test_an_engine_that_was_updated_while_it_drained_is_asked_anew(site: Site) -> None:
    await order(site, "/admin/instances/drain", "decode/1")
    site.world.versions["decode/1"] = NEW  # So fast that nobody noticed.
    answer = await order(site, "/admin/instances", "decode/1")
    assert [bool(row.get("unfit")) for row in answer.json["instances"]].count(True) == 1
    await all_served(site, 10)
    assert "decode/1" not in by_engine(site)


def test_pooled_requests_are_prefilled_again_when_their_last_rank_goes() -> None:
    versions = {"prefill/1": NEW, "decode/1": NEW}

    async def scenario(site: Site) -> None:
        exchanges = [site.send(COMPLETIONS, body(number, 200)) for number in range(12)]
        await asyncio.sleep(1.0)  # Some wait in the pool for the one slot of either rank.
        await order(site, "/admin/instances/drain", "decode/1")
        for exchange in exchanges:
            assert (await exchange.end()).done
        assert mixed_pairs(site) == 0

    play(scenario, engine_versions=versions, batch_limit=2, flags={"batch": 2, "pool_limit": 8})


@pytest.mark.parametrize("how", ["drained", "killed"])
@served(prefillers=1, ranks=1, batch_limit=2, flags={"batch": 2, "pool_limit": 2})
async def test_another_version_in_the_only_prefillers_place_ends_what_waits_and_says_why(
    site: Site, how: str
) -> None:
    exchanges = [site.send(COMPLETIONS, body(number, 100)) for number in range(12)]
    await site.until(lambda: sum(bool(one.events) for one in exchanges) == 2)
    site.world.versions["prefill/0"] = NEW
    if how == "killed":
        site.fleet.kill("prefill/0")
        await site.fleet.restore("prefill/0")
    else:
        await order(site, "/admin/instances/drain", "prefill/0")
        await order(site, "/admin/instances", "prefill/0")
    ended = [await exchange.end() for exchange in exchanges]
    served_, refused = ([one for one in ended if one.status == status] for status in (200, 503))
    assert len(served_) >= 2
    assert len(served_) + len(refused) == 12
    assert all(one.done for one in served_)
    told = {one.json["error"]["message"] for one in refused}
    assert told == {UNFIT.replace(f"{NEW} and {OLD}", f"{OLD} and {NEW}")}
    # What was prefilled before may be pulled from the engine that is there now, once.
    assert mixed_pairs(site) <= (2 if how == "killed" else 0)
    assert sum(by_engine(site).values()) <= 2 * 12
    assert (await site.state())["decoding"] == 0


def update_order(rng: random.Random) -> list[str]:
    """Return all engines in an order that leaves one pair that fits at any time."""
    prefill, decode = ([f"{role}/{i}" for i in range(3)] for role in ("prefill", "decode"))
    rng.shuffle(prefill)
    rng.shuffle(decode)
    first, others = [prefill.pop(), decode.pop()], prefill + decode
    rng.shuffle(first)
    rng.shuffle(others)
    return first + others


def rolling_update(seed: int, connector: str) -> None:
    """Drain each engine, restart it with the new version, and take it back, under load."""
    rng = random.Random(seed)

    async def update(site: Site, engine: str) -> None:
        url, role = site.fleet.engine(engine).url, engine.partition("/")[0]
        waited = {"role": role, "url": url, "wait_s": 100}
        assert (await site.admin("/admin/instances/drain", waited)).status == 200
        site.fleet.kill(engine)
        site.world.versions[engine] = NEW
        await asyncio.sleep(rng.choice([0.0, 0.1, 3.0]))
        await site.fleet.restore(engine)
        assert (await order(site, "/admin/instances", engine)).status == 200
        for _ in range(100):
            if (await rows(site))[engine]["status"] == "up":
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"{engine} did not come back")

    async def scenario(site: Site) -> None:
        going, exchanges = True, list[Exchanged]()

        async def load() -> None:
            while going:
                exchanges.append(site.send(COMPLETIONS, body(len(exchanges), rng.randint(1, 60))))
                await asyncio.sleep(rng.expovariate(4.0))

        clients = asyncio.create_task(load())
        await asyncio.sleep(1.0)
        for engine in update_order(rng):
            await update(site, engine)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
        going = False
        await clients
        for exchange in exchanges:
            assert (await exchange.end()).done, (exchange.status, exchange.body)
        assert {one.outcome for one in site.world.ended} == {Outcome.OK}
        assert mixed_pairs(site) == 0
        told = await rows(site)
        assert {row["version"] for row in told.values()} == {NEW}
        assert not any("unfit" in row for row in told.values())

    play(
        scenario,
        connector=connector,
        prefillers=3,
        ranks=3,
        batch_limit=16,
    )


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@pytest.mark.parametrize("seed", range(2))
def test_a_rolling_update_loses_nothing_and_pairs_nothing_mixed(seed: int, connector: str) -> None:
    rolling_update(seed, connector)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 60))
def test_rolling_updates_in_any_order(seed: int) -> None:
    rolling_update(seed, "nixl")
