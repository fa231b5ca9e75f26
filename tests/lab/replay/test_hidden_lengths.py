"""What a proxy between a replay and emulated engines learns of the lengths of answers in advance: nothing."""

import asyncio
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.extended import usually
from tests.support.chaos.world import World, WorldSettings
from tests.support.played import in_virtual_time
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run
from tests.two_leg_router import TwoLegRouter

from balanceroute.predictors import NoPrediction
from balanceroute.predictors.evaluation import Replay, judge
from balanceroute.predictors.past import read_log
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.replay.driver import ReplayResult, replay
from balanceroute.proxy.lab.replay.requests import (
    SHARES,
    PlannedRequest,
    ReplayApi,
    ReplayLengths,
    ReplaySettings,
    with_limits,
)
from balanceroute.proxy.live.telemetry.request_log import line_of
from balanceroute.proxy.wire.http1.server_connection import ServerConnection

MS = 1_000_000
# The longest is beyond the least limit, which then cuts it.
_LENGTHS = (2, 3, 9, 30, 31, 60, 300)


@dataclass
class Seen:
    """What came of a replay."""

    result: ReplayResult  # Its own account.
    received: list[bytes]  # What clients sent to the proxy: one item a request, head and body.
    log: bytes  # The proxy's request log.


@pytest.fixture
def taps(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[object, bytearray]]:
    """Return every byte that any server of the loop receives, by its port and the connection."""
    heard: dict[int, dict[object, bytearray]] = {}
    receive = ServerConnection.data_received
    made = ServerConnection.connection_made
    ports: dict[object, int] = {}

    def connection_made(self: ServerConnection, transport: asyncio.BaseTransport) -> None:
        ports[self] = transport.get_extra_info("sockname")[1]
        made(self, transport)

    def data_received(self: ServerConnection, data: bytes) -> None:
        heard.setdefault(ports[self], {}).setdefault(self, bytearray()).extend(data)
        receive(self, data)

    monkeypatch.setattr(ServerConnection, "connection_made", connection_made)
    monkeypatch.setattr(ServerConnection, "data_received", data_received)
    return heard


def requests_of(connections: dict[object, bytearray]) -> list[bytes]:
    """Cut what connections received into requests, in an order of their own."""
    found: list[bytes] = []
    for connection in connections.values():
        text = bytes(connection)
        while text:
            head, _, rest = text.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            size = int(fields.get(b"content-length", b"0"))
            found.append(head + b"\n" + rest[:size])
            text = rest[size:]
    return sorted(found)


def planned(seed: int, api: ReplayApi, *, count: int) -> list[PlannedRequest]:
    """Return requests whose lengths, and nothing else, follow from the seed."""
    rng = random.Random(seed)
    requests = [
        PlannedRequest(i, 20 * MS * i, 20 + i % 7, rng.choice(_LENGTHS)) for i in range(count)
    ]
    return with_limits(requests, seed=0, api=api)


def replayed(
    requests: list[PlannedRequest],
    taps: dict[int, dict[object, bytearray]],
    *,
    lengths: ReplayLengths = ReplayLengths.HIDDEN,
    **changes: Any,
) -> Seen:
    """Replay through a proxy with BR-H, which asks its predictor all the time."""

    async def main(loop: VirtualLoop) -> Seen:
        engines = EmulationSettings(
            prefillers=2, ranks=2, batch_limit=16, step_base_ns=10 * MS, mean_output_tokens=5.0
        )
        flags = {"policy": "br-h", "predictor": "exact-match"}
        world = World(WorldSettings(engines, flags), loop, random.Random(3))
        await world.start()
        try:
            settings = ReplaySettings(
                target=f"http://127.0.0.1:{world.port}",
                emulation=world.fleet.decode_urls[0],
                lengths=lengths,
                **changes,
            )
            result = await replay(settings, requests)
        finally:
            await world.close()
        log = b"".join(line_of(record) for record in world.ended)
        return Seen(result, requests_of(taps[world.port]), log)

    taps.clear()
    return run(main, seed=0, limit_s=100_000.0)


def auc_of_no_prediction(log: bytes, folder: Path) -> float:
    """Return how well the limits in a log alone tell who ends within 40 more tokens."""
    path = folder / "req.log"
    path.write_bytes(log)
    questions = Replay(read_log(path), horizon_steps=40, age_step=20)
    (judgement,) = judge(questions, {"none": NoPrediction()}, baseline="none").values()
    return judgement.scores.auc


@pytest.mark.parametrize(
    "api", usually({"chat", "completions"}, ReplayApi, ids=[one.value for one in ReplayApi])
)
def test_traces_that_differ_in_lengths_alone_are_the_same_requests_to_the_proxy(
    api: ReplayApi, taps: dict[int, dict[object, bytearray]]
) -> None:
    """A replay sent the length of each answer as `max_tokens`."""
    one, other = (planned(seed, api, count=60) for seed in (1, 2))
    assert [r.output_tokens for r in one] != [r.output_tokens for r in other]
    first, second = (replayed(requests, taps, api=api) for requests in (one, other))
    assert len(first.received) == 61  # One asks for the models.
    assert first.received == second.received
    for requests, seen in ((one, first), (other, second)):
        figures = seen.result.figures
        assert (figures.finished, figures.wrong_lengths) == (60, 0)
        assert figures.output_tokens == sum(request.answer_tokens for request in requests)


def test_the_log_tells_a_predictor_nothing_of_the_lengths(
    tmp_path: Path, taps: dict[int, dict[object, bytearray]]
) -> None:
    """With the limits of such a log alone, `none` was right every time."""
    requests = planned(1, ReplayApi.COMPLETIONS, count=120)
    hidden = replayed(requests, taps).log
    revealed = replayed(requests, taps, lengths=ReplayLengths.MAX_TOKENS).log
    assert auc_of_no_prediction(hidden, tmp_path) == pytest.approx(0.5, abs=0.02)
    assert auc_of_no_prediction(revealed, tmp_path) == 1.0
    lines = [json.loads(line) for line in hidden.splitlines()]
    limits = [line["max_tokens"] for line in lines if line["output_tokens"]]
    assert sorted(set(limits)) == sorted(limit for limit in SHARES if limit is not None)


def test_engines_know_the_lengths_behind_a_router_with_ids_of_its_own() -> None:
    """vllm-router replaces `X-Request-Id`: answers behind it were as long as the model liked."""

    async def main(_: VirtualLoop) -> ReplayResult:
        engines = EmulationSettings(prefillers=2, ranks=2, mean_output_tokens=5.0)
        fleet = EmulatedFleet(engines, rng=random.Random(3))
        await fleet.start()
        router = TwoLegRouter(fleet.prefill_urls, fleet.decode_urls)
        try:
            settings = ReplaySettings(
                target=f"http://127.0.0.1:{await router.start()}",
                model=engines.model,
                emulation=fleet.decode_urls[0],
                lengths=ReplayLengths.HIDDEN,
            )
            return await replay(settings, planned(1, ReplayApi.COMPLETIONS, count=60))
        finally:
            router.close()
            await fleet.close()

    figures = run(main, seed=0).figures
    assert (figures.finished, figures.wrong_lengths) == (60, 0)


@in_virtual_time(seed=0)
async def test_a_fleet_that_takes_no_lengths_ends_the_replay_before_it_begins(
    loop: VirtualLoop,
) -> None:
    """The target itself is asked in place of a fleet: it has no such route."""
    world = World(WorldSettings(EmulationSettings(), {}), loop, random.Random(3))
    await world.start()
    try:
        url = f"http://127.0.0.1:{world.port}"
        settings = ReplaySettings(target=url, emulation=url, lengths=ReplayLengths.HIDDEN)
        with pytest.raises(Exception, match="/emulation/stats/reset: http 404"):
            await replay(settings, planned(1, ReplayApi.CHAT, count=3))
        assert {record.endpoint for record in world.ended} == {"/emulation/stats/reset"}
    finally:
        await world.close()


def test_limits_follow_from_the_seed_and_the_number_alone() -> None:
    requests = [PlannedRequest(i, 0, 5, 5) for i in range(8_000)]
    drawn = with_limits(requests, seed=0, api=ReplayApi.CHAT)
    longer = [replace(one, output_tokens=900, prompt_tokens=7, arrival_ns=1) for one in requests]
    assert [one.max_tokens for one in with_limits(longer, seed=0, api=ReplayApi.CHAT)] == [
        one.max_tokens for one in drawn
    ]
    assert with_limits(requests, seed=1, api=ReplayApi.CHAT) != drawn
    for limit, share in SHARES.items():
        count = sum(one.max_tokens == limit for one in drawn)
        assert count == pytest.approx(len(drawn) * share / 100, rel=0.1)


def test_a_completion_and_a_message_always_have_a_limit() -> None:
    requests = [PlannedRequest(i, 0, 5, 5) for i in range(1_000)]
    limits = {
        api: [one.max_tokens for one in with_limits(requests, seed=0, api=api)] for api in ReplayApi
    }
    assert limits[ReplayApi.CHAT] == limits[ReplayApi.RESPONSES]
    assert [limit or 4096 for limit in limits[ReplayApi.CHAT]] == limits[ReplayApi.COMPLETIONS]
    assert limits[ReplayApi.COMPLETIONS] == limits[ReplayApi.MESSAGES]


def test_an_answer_is_cut_at_its_limit() -> None:
    request = PlannedRequest(0, 0, 5, 300)
    lengths = [replace(request, max_tokens=limit).answer_tokens for limit in (None, 256, 300, 301)]
    assert lengths == [300, 256, 300, 300]
