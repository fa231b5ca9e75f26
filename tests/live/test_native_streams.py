"""`balanceroute serve` with the native library: its streams are those that it sends without."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.served import Served, engines, serving
from tests.live.test_hand_over import begin, served_by, until_waiting
from tests.native import needs_native
from tests.support.played import in_real_time
from tests.support.site import Exchanged

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet

pytestmark = needs_native

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TALK = [{"role": "user", "content": "t1 t2 t3"}]
TOKENS = 80
# Two proxies one after the other; only ever waited for by a test that fails.
PATIENCE_S = 180.0
# Of one engine step: long enough that a busy machine seldom gathers several.
STEP_NS = 10_000_000
# Of three streams: what comes before the third wait of the engine, and the last event, is not ordinary.
LONG = 400
ORDINARY = 3 * (LONG - 5)
# What differs from run to run.
IDS = re.compile(rb'"((?:item_|response_|request_)?id)":"[^"]*"')
TIMES = re.compile(rb'"((?:created|completed)(?:_at)?)":[\d.]+')
# Of a line of the request log.
TOLD = ("endpoint", "outcome", "status", "prompt_tokens", "output_tokens", "cached_tokens")


def asking(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    values: dict[str, Any] = {"model": "tiny", "stream": True, "ignore_eos": True}
    if path == RESPONSES:
        values |= {"input": "t1 t2 t3", "max_output_tokens": TOKENS}
    else:
        values |= {"max_tokens": TOKENS}
        values |= {"prompt": "t1 t2 t3"} if path == COMPLETIONS else {"messages": TALK}
    return path, values | more


ASKED = [
    asking(CHAT),
    asking(CHAT, stream_options={"include_usage": True}),
    asking(CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    asking(CHAT, logprobs=True, top_logprobs=2),
    asking(COMPLETIONS),
    asking(COMPLETIONS, n=2),
    asking(COMPLETIONS, return_token_ids=True),
    asking(MESSAGES),
    asking(RESPONSES),
]


def shown(events: list[bytes]) -> list[bytes]:
    return [TIMES.sub(rb'"\1":0', IDS.sub(rb'"\1":""', one)) for one in events]


async def metric(served: Served, name: str) -> float:
    page = (await served.admin.get("/metrics")).body.decode()
    (found,) = re.findall(rf"^balanceroute_{name} (\S+)$", page, re.MULTILINE)
    return float(found)


async def reasons(served: Served) -> dict[str, float]:
    """Return how many streams came back for which reason."""
    page = (await served.admin.get("/metrics")).body.decode()
    found = re.findall(r'pumped_returns_total{reason="(\w+)"} (\S+)', page)
    return {reason: float(count) for reason, count in found}


Play = Callable[["EmulatedFleet", Served], Coroutine[Any, Any, Any]]


async def both_ways(
    folder: Path,
    main: Play,
    *flags: str,
    ranks: int = 1,
) -> tuple[list[Any], list[list[dict[str, Any]]]]:
    """Play the same without and with the library; return what came of it, and the request logs."""
    results, logs = [], []
    for native in ("off", "require"):
        log = folder / f"{native}.log"
        async with (
            engines(ranks=ranks, step_base_ns=STEP_NS) as fleet,
            serving(
                fleet.prefill_urls,
                fleet.decode_urls,
                *("--native", native, "--log", str(log), *flags),
            ) as served,
        ):
            results.append(await main(fleet, served))
            moved = await metric(served, "pumped_events_total")
            assert bool(moved) is (native == "require")
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        ended = [line for line in lines if line.get("event") == "request_ended"]
        logs.append([{name: line.get(name) for name in TOLD} for line in ended])
    return results, logs


@in_real_time(patience_s=PATIENCE_S)
async def test_every_stream_is_the_same(tmp_path: Path) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Any:
        sent = [served.client.send(b"POST", *one) for one in ASKED]
        for one in sent:
            await one.end()
            assert (one.status, one.error) == (200, None)
        return [shown(one.events) for one in sent]

    (off, native), logs = await both_ways(tmp_path, main)
    for without, with_it in zip(off, native, strict=True):
        assert with_it == without
        assert len(without) > 20
    off_log, native_log = (sorted(map(str, one)) for one in logs)
    assert len(off_log) == len(ASKED)
    assert native_log == off_log


GENERATE = (
    "/inference/v1/generate",
    {"model": "tiny", "stream": True, "token_ids": [1, 2, 3]}
    | {"sampling_params": {"max_tokens": TOKENS, "ignore_eos": True}},
)


ASKED_AGAIN = {"chat": asking(CHAT), "completion": asking(COMPLETIONS), "ids": GENERATE}


@pytest.mark.parametrize(
    ("fault", "asked"),
    [
        pytest.param("reset_after_tokens", ["chat", "completion", "ids"], id="reset"),
        pytest.param("stall_after_tokens", ["chat"], id="stall"),
        pytest.param(
            *("stall_after_tokens", ["completion", "ids"]),
            id="others' stall",
            marks=pytest.mark.extended,
        ),
    ],
)
@in_real_time(patience_s=PATIENCE_S)
async def test_a_stream_goes_on_elsewhere_from_the_ids_that_were_kept_natively(
    tmp_path: Path, fault: str, asked: list[str]
) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Any:
        told = []
        for kind in asked:
            fleet.faults.set("decode/0", **{fault: 50})
            sent = served.client.send(b"POST", *ASKED_AGAIN[kind])
            await sent.until_events(50)
            fleet.faults.clear("decode")
            await sent.end()
            assert (sent.status, sent.error) == (200, None)
            told.append(shown(sent.events))
        return told

    flags = ("--resume", "valid", "--idle-stream-timeout-s", "1", "--policy", "round-robin")
    (off, native), logs = await both_ways(tmp_path, main, *flags, ranks=2)
    assert native == off
    assert logs[0] == logs[1]


@in_real_time(patience_s=PATIENCE_S)
async def test_nearly_all_of_it_is_moved_natively() -> None:
    async with (
        engines(step_base_ns=STEP_NS) as fleet,
        serving(
            fleet.prefill_urls,
            fleet.decode_urls,
            *("--native", "require", "--native-threads", "2"),
        ) as served,
    ):
        asked = [asking(path, max_tokens=LONG) for path in (CHAT, COMPLETIONS, CHAT)]
        sent = [served.client.send(b"POST", *one) for one in asked]
        await asyncio.gather(*(one.until_events(100) for one in sent))
        state = (await served.admin.get("/admin/state?requests=1")).json["state"]
        assert len(state["requests"]) == 3
        assert all(row["emitted_tokens"] > 50 for row in state["requests"])
        assert state["steps"] > 50
        for one in sent:
            await one.end()
        moved = await metric(served, "pumped_events_total")
        returns = await reasons(served)
        assert 0.95 * ORDINARY <= moved <= ORDINARY, returns
        assert await metric(served, "pumped_streams_total") == sum(returns.values()) >= 3
        assert returns["event"] >= 3  # The last of each is none that goes on.
        gaps = await metric(served, "inter_token_latency_seconds_count")
        # One for each event that came alone, but for the first.
        assert 0.8 * 3 * LONG < gaps <= 3 * LONG


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"reset_after_tokens": 20}, "upstream_error"),
    ({"end_after_tokens": 20}, "upstream_error"),
    ({"error_event_after_tokens": 20}, "upstream_error"),
    ({"stall_after_tokens": 20}, "upstream_error"),
    ({"lose_end": True}, "ok"),
    ({"keep_alive_s": 0.03}, "ok"),
    ({"malformed": "comments"}, "ok"),
    ({"malformed": "crlf"}, "ok"),
    ({"malformed": "joined"}, "ok"),
]


@in_real_time(patience_s=PATIENCE_S)
async def test_engines_that_fail_are_told_as_ever(tmp_path: Path) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Any:
        told = []
        for number, (fault, _) in enumerate(FAULTS):
            fleet.faults.set("decode", **fault)
            # Two engines must not die under the same.
            talk = [{"role": "user", "content": f"t{number}"}]
            sent = served.client.send(b"POST", *asking(CHAT, messages=talk, max_tokens=30))
            await sent.end()
            comments = [one for one in sent.events if one[:1] != b":"]
            told.append((shown(comments), sent.error is None))
            fleet.faults.clear("decode")
        return told

    flags = ("--idle-stream-timeout-s", "1", "--quarantine-failures", "100")
    (off, native), logs = await both_ways(tmp_path, main, *flags)
    for without, with_it in zip(off, native, strict=True):
        assert with_it == without
    for log in logs:
        assert [line["outcome"] for line in log] == [outcome for _, outcome in FAULTS]
    assert logs[0] == logs[1]


async def in_use(served: Served) -> int:
    """Return the descriptors of the process, but for what it keeps open to its engines."""
    state = (await served.admin.get("/admin/state")).json["state"]
    return len(os.listdir(f"/proc/{served.process.pid}/fd")) - int(state["engine_connections"])


@in_real_time(patience_s=PATIENCE_S)
async def test_no_descriptor_is_lost_of_streams_that_end_in_any_way() -> None:
    flags = ("--native", "require", "--quarantine-failures", "1000")
    async with (
        engines(step_base_ns=STEP_NS) as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
    ):
        await served.client.send(b"POST", *asking(CHAT)).end()
        served.client.close()
        before = await in_use(served)
        # One engine breaks its streams off, of the other's some clients leave.
        fleet.faults.set("decode/0", reset_after_tokens=100)
        sent = [served.client.send(b"POST", *asking(CHAT, max_tokens=LONG)) for _ in range(28)]
        await asyncio.gather(*(one.until_events(50) for one in sent))
        for one in sent[::4]:
            one.call.abort()
        rest = [one for place, one in enumerate(sent) if place % 4]
        await asyncio.gather(*(one.end() for one in rest))
        assert {one.error is None for one in rest} == {True, False}
        served.client.close()
        while await in_use(served) > before:
            pass
        returns = await reasons(served)
        assert await metric(served, "pumped_streams_total") == sum(returns.values()) >= 28
        broken = returns["end"] + returns["engine"]
        assert min(returns["event"], broken, returns["asked"]) > 0, returns
        served.process.send_signal(signal.SIGTERM)
        assert await served.exit() == (0, "")


@in_real_time(patience_s=PATIENCE_S)
async def test_a_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Any:
        sent = served.client.send(b"POST", *asking(CHAT, max_tokens=100_000))
        await sent.until_events(40)
        sent.call.abort()
        while any(fleet.stats()["running"]):  # Else its engine would go on for minutes.
            await served.admin.get("/health")

    _, logs = await both_ways(tmp_path, main)
    for (line,) in logs:
        assert line["outcome"] == "cancelled"
        assert line["output_tokens"] >= 30


@in_real_time(patience_s=PATIENCE_S)
async def test_a_drain_ends_what_is_under_way(tmp_path: Path) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Exchanged:
        sent = served.client.send(b"POST", *asking(CHAT))
        await sent.until_events(30)
        served.process.send_signal(signal.SIGTERM)
        await sent.end()
        assert sent.done
        return sent

    async with (
        engines(step_base_ns=STEP_NS) as fleet,
        serving(
            fleet.prefill_urls,
            fleet.decode_urls,
            *("--native", "require"),
        ) as served,
    ):
        await main(fleet, served)
        assert (await served.exit())[0] == 0


@in_real_time(patience_s=PATIENCE_S)
async def test_a_new_version_takes_over_from_one_whose_streams_are_away(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--native", "require")
    async with served_by(*flags, log=log, step_base_ns=STEP_NS) as served:
        sent = [served.client.send(b"POST", *asking(CHAT, max_tokens=LONG)) for _ in range(8)]
        await asyncio.gather(*(one.until_events(50) for one in sent))
        returned = sum((await reasons(served)).values())
        while await metric(served, "pumped_streams_total") - returned < len(sent):
            returned = sum((await reasons(served)).values())
        await begin(served)
        # Of these the old process has the half and more left when the new one serves.
        for one in sent:
            await one.end()
            assert (one.done, one.error) == (True, None)
            assert len(one.events) == LONG + 2
        await until_waiting(served.process.pid)
        again = served.client.send(b"POST", *asking(CHAT))
        await again.end()
        assert again.done
        assert await metric(served, "pumped_streams_total") > 0  # Of the new one.


@in_real_time(patience_s=PATIENCE_S)
async def test_a_client_hears_that_its_engine_is_silent(tmp_path: Path) -> None:
    async def main(fleet: "EmulatedFleet", served: Served) -> Any:
        sent = served.client.send(b"POST", *asking(CHAT))
        await sent.until_events(30)
        fleet.faults.set("decode", frozen="alone")
        while b": keep-alive\n\n" not in sent.events:
            await served.admin.get("/health")
        fleet.faults.clear("decode")
        await sent.end()
        assert sent.done
        return shown([one for one in sent.events if one[:1] != b":"])

    flags = ("--sse-keep-alive-s", "1")
    (off, native), _ = await both_ways(tmp_path, main, *flags)
    assert native == off
