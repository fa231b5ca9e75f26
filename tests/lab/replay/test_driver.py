"""Whole replays against a scripted engine, in virtual time: what is sent, and what is measured."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from tests.support.virtual.addresses import Link
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.driver import FleetFigures, ReplayProgress, ReplayResult, replay
from balanceroute.proxy.lab.replay.exchange import TargetError
from balanceroute.proxy.lab.replay.figures import STEADY_STATE, WHOLE_RUN, FaultCount
from balanceroute.proxy.lab.replay.requests import PlannedRequest, ReplayApi, ReplaySettings
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, WireError

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]
S = 1_000_000_000
TIMEOUT_S = 60.0
# What may happen after the second token.
BREAKS = {"reset", "stall", "endless", "error", "error and reset", "error and stall"}


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Engine:
    """Streams a token at once and another one every `step_s`, unless it is set to misbehave."""

    # What happens to a request, by the number at the end of its id.
    faults: Mapping[int, str] = field(default_factory=dict)
    first_s: float = 0.0  # Until the first token.
    step_s: float = 0.0  # Between tokens.
    fleet: object = None  # What `/emulation/stats` answers.
    fleet_status: int = 200
    models: object = field(default_factory=lambda: {"data": [{"id": "tiny"}, {"id": "other"}]})
    # Of each request its time and itself.
    seen: list[tuple[float, HttpRequest]] = field(default_factory=list)
    # Of each call to the fleet's figures its time and path.
    calls: list[tuple[float, str]] = field(default_factory=list)
    keys: set[bytes | None] = field(default_factory=set)  # The authorizations that came.
    running: int = 0  # Requests in progress.
    most: int = 0  # The most there were at once.
    closed_early: int = 0

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for _, request in self.seen]

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        now_s = asyncio.get_running_loop().time()
        self.keys.add(request.header(b"authorization"))
        if request.path == b"/v1/models":
            reply.send(200, JSON, json.dumps(self.models).encode())
        elif request.path.startswith(b"/emulation/"):
            self.calls.append((now_s, f"{request.method.decode()} {request.path.decode()}"))
            reply.send(self.fleet_status, JSON, json.dumps(self.fleet).encode())
        else:
            self.seen.append((now_s, request))
            self._answer(request, reply)

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        identity = request.header(b"x-request-id")
        assert identity is not None
        fault = self.faults.get(int(identity.rpartition(b"-")[2]))
        if fault == "refuse":
            error = {"error": {"message": "no room", "type": "ServiceUnavailable"}}
            reply.send(503, [*JSON, (b"retry-after", b"7")], json.dumps(error).encode())
            return
        if fault == "html":
            reply.send(502, [(b"content-type", b"text/html")], b"<h1>Bad\nGateway</h1>" * 999)
            return
        if fault == "silent":
            reply.on_closed = self._left
            return
        self.running += 1
        self.most = max(self.most, self.running)
        reply.on_closed = self._left
        reply.start(200, EVENTS)
        asyncio.get_running_loop().call_later(
            self.first_s, self._token, json.loads(request.body), reply, fault, 1
        )

    def _left(self) -> None:
        self.running -= 1
        self.closed_early += 1

    def _token(self, body: dict[str, Any], reply: Reply, fault: str | None, token: int) -> None:
        if reply.closed:
            return
        last = token == body["max_tokens"]
        choice: dict[str, object] = {"index": 0}
        choice |= {"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}
        choice["finish_reason"] = "length" if last and fault != "no reason" else None
        reply.write(event({"choices": [choice]}))
        if token == 2 and fault in BREAKS:
            self._break(reply, fault)
        elif last:
            self.running -= 1
            self._end(body, reply, fault)
        else:
            asyncio.get_running_loop().call_later(
                self.step_s, self._token, body, reply, fault, token + 1
            )

    def _break(self, reply: Reply, fault: str) -> None:
        if fault.startswith("error"):
            reply.write(event({"error": {"message": "out of memory", "code": 500}}))
        if fault == "endless":
            reply.write(bytes(17 << 20))
        if fault.endswith("stall") or fault == "endless":
            return
        self.running -= 1
        if fault.endswith("reset"):
            reply.abort()
        else:
            reply.write(b"data: [DONE]\n\n")
            reply.end()

    def _end(self, body: dict[str, Any], reply: Reply, fault: str | None) -> None:
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        usage = {
            "prompt_tokens": len(prompt.split(" ")) + ("messages" in body),
            "completion_tokens": body["max_tokens"],
        }
        if fault != "no usage":
            reply.write(event({"choices": [], "usage": usage}))
        if fault != "no done":
            reply.write(b"data: [DONE]\n\n")
        reply.end()


def requests(
    count: int, *, apart_s: float = 1.0, prompt: int = 10, output: int = 4
) -> list[PlannedRequest]:
    return [
        PlannedRequest(number, round(number * apart_s * S), prompt, output)
        for number in range(count)
    ]


def replayed(
    engine: Engine,
    planned: Sequence[PlannedRequest],
    *,
    progress: Callable[[ReplayProgress], None] | None = None,
    stop_after_s: float | None = None,
    fleet: bool = False,
    **settings: Any,
) -> ReplayResult:
    """Replay against an engine at the other end of a wire without delay."""

    async def main(loop: asyncio.AbstractEventLoop) -> ReplayResult:
        server = Server(engine)
        await server.start("127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}"
        stop = asyncio.Event()
        timer = None
        if stop_after_s is not None:
            timer = loop.call_later(stop_after_s, stop.set)
        try:
            return await replay(
                ReplaySettings(
                    target=url,
                    emulation=url if fleet else None,
                    **{"timeout_s": TIMEOUT_S} | settings,
                ),
                planned,
                progress=progress,
                stop=stop,
            )
        finally:
            if timer is not None:
                timer.cancel()
            # No connection is left, and after every timeout could have struck no timer.
            await asyncio.sleep(0.1)
            left = server.connections
            await asyncio.sleep(TIMEOUT_S)
            assert left == 0
            server.close()
            await server.drain()

    return run(main, seed=0, link=Link(latency_s=0.0))


def sent_s(result: ReplayResult) -> list[float]:
    return [(sample.sent_ns - result.start_ns) / 1e9 for sample in result.samples]


def test_open_loop_sends_at_the_recorded_times_over_the_rate() -> None:
    engine = Engine(step_s=10.0)
    result = replayed(engine, requests(4, apart_s=3.0), rate=2.0)
    assert sent_s(result) == pytest.approx([0.0, 1.5, 3.0, 4.5])
    times_s = [time_s for time_s, _ in engine.seen]
    assert [time_s - times_s[0] for time_s in times_s] == pytest.approx([0.0, 1.5, 3.0, 4.5])
    assert result.figures.send_late_ms_p99 == pytest.approx(0.0, abs=1e-3)


def test_requests_that_arrive_together_are_sent_together() -> None:
    result = replayed(Engine(), requests(50, apart_s=0.0))
    assert sent_s(result) == [0.0] * 50
    assert result.figures.finished == 50


def test_closed_loop_keeps_as_many_outstanding_as_told() -> None:
    engine = Engine(step_s=1.0)
    result = replayed(engine, requests(7, apart_s=100.0), concurrency=3)
    assert engine.most == 3
    # Four tokens take three steps.
    assert sent_s(result) == pytest.approx([0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0])


def test_closed_loop_with_more_than_there_are_sends_all_at_once() -> None:
    assert sent_s(replayed(Engine(step_s=1.0), requests(3), concurrency=9)) == [0.0] * 3


def test_closed_loop_goes_on_after_failures() -> None:
    engine = Engine(faults={0: "refuse", 1: "reset", 2: "no done"})
    result = replayed(engine, requests(6), concurrency=1)
    assert [sample.fault is None for sample in result.samples] == 3 * [False] + 3 * [True]


def test_times_are_measured_on_the_loops_clock() -> None:
    engine = Engine(first_s=0.5, step_s=0.2)
    result = replayed(engine, requests(30))
    figures = result.figures
    assert figures.window == STEADY_STATE
    assert figures.ttft_ms_p50 == pytest.approx(500.0)
    assert figures.ttft_ms_p99 == pytest.approx(500.0)
    assert figures.itl_ms_p50 == pytest.approx(200.0)
    assert figures.tpot_ms_p95 == pytest.approx(200.0)
    # The usage and the end come with the last token.
    assert figures.e2e_s_p99 == pytest.approx(1.1)
    assert figures.output_tokens == figures.output_tokens_asked == 120
    assert figures.uneven_events == 0
    # The third request ends 1.1 s after it was sent; the last one is sent at 29 s.
    assert figures.duration_s == pytest.approx(29.0 - 3.1)
    assert figures.request_rate == pytest.approx(26 / 25.9)


def test_a_target_that_runs_faster_is_driven_and_measured_in_its_own_time() -> None:
    engine = Engine(first_s=0.05, step_s=0.02)
    result = replayed(engine, requests(30), time_scale=10.0)
    assert sent_s(result)[-1] == pytest.approx(2.9)
    figures = result.figures
    assert figures.ttft_ms_p50 == pytest.approx(500.0)
    assert figures.tpot_ms_p50 == pytest.approx(200.0)
    assert figures.e2e_s_p50 == pytest.approx(1.1)
    assert figures.duration_s == pytest.approx(25.9)
    assert figures.output_tokens_per_s == pytest.approx(4.0, rel=0.05)


def test_the_timeout_is_of_the_targets_time() -> None:
    engine = Engine(faults={1: "stall"})
    result = replayed(engine, requests(2), time_scale=10.0, timeout_s=60.0)
    (_, stalled) = result.samples
    assert stalled.end_ns is not None
    assert (stalled.end_ns - stalled.sent_ns) / 1e9 == pytest.approx(6.0)


@pytest.mark.parametrize("api", [ReplayApi.CHAT, ReplayApi.COMPLETIONS])
def test_each_api_is_spoken(api: ReplayApi) -> None:
    engine = Engine()
    result = replayed(engine, requests(2), api=api)
    assert {request.path.decode() for _, request in engine.seen} == {api.path}
    assert result.figures.finished == 2
    # The engine counts one more for a chat.
    assert result.figures.prompt_tokens_asked == 20
    assert result.figures.prompt_tokens == (22 if api is ReplayApi.CHAT else 20)


def test_every_request_asks_for_what_was_recorded_under_an_id_of_its_own() -> None:
    engine = Engine()
    planned = [PlannedRequest(5, 0, 7, 3), PlannedRequest(9, S, 600, 2)]
    replayed(engine, planned, request_ids="a", seed=3)
    assert [(len(b["prompt"].split(" ")), b["max_tokens"]) for b in engine.bodies()] == [
        (7, 3),
        (600, 2),
    ]
    ids = [request.header(b"x-request-id") for _, request in engine.seen]
    assert ids == [b"a-5", b"a-9"]
    assert {request.header(b"content-type") for _, request in engine.seen} == {b"application/json"}


def test_the_model_is_the_first_of_the_list_unless_it_is_named() -> None:
    engine = Engine()
    assert replayed(engine, requests(1)).model == "tiny"
    assert replayed(engine, requests(1), model="mine").model == "mine"
    assert [body["model"] for body in engine.bodies()] == ["tiny", "mine"]


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{}]}, [], None])
def test_a_target_without_models_is_refused(models: object) -> None:
    with pytest.raises(TargetError, match="no model in the answer: name one with --model"):
        replayed(Engine(models=models), requests(1))


def test_the_key_is_a_bearer_token_of_every_request() -> None:
    engine = Engine()
    replayed(engine, requests(2), api_key="secret")
    assert engine.keys == {b"Bearer secret"}


FAULTS = {
    "refuse": ("http 503", "no room"),
    "html": ("http 502", "<h1>Bad Gateway</h1><h1>Bad"),
    "reset": ("reset", ""),
    "error": ("error event", "out of memory"),
    "error and reset": ("error event", "out of memory"),
    "error and stall": ("error event", "out of memory"),
    "endless": ("too large", "an event is larger than"),
    "no done": ("short stream", "the answer ended without [DONE]"),
    "no reason": ("short stream", "the answer ended without a finish_reason"),
    "silent": ("timeout", "no whole answer in time, 0 token events so far"),
    "stall": ("timeout", "no whole answer in time, 2 token events so far"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_failure_has_its_kind_and_message(fault: str) -> None:
    engine = Engine(faults={1: fault}, step_s=0.01)
    result = replayed(engine, requests(3))
    kind, message = FAULTS[fault]
    (count,) = result.faults
    assert (count.kind, count.requests) == (kind, 1)
    assert count.example.startswith(message)
    assert len(count.example) <= 200
    assert (result.figures.finished, result.figures.errors) == (2, 1)
    assert engine.running == (-1 if fault == "silent" else 0)


def test_failures_are_counted_by_kind_with_the_first_message() -> None:
    engine = Engine(faults={0: "no reason", 1: "refuse", 2: "no done", 3: "refuse", 4: "refuse"})
    result = replayed(engine, requests(6))
    assert result.faults == [
        FaultCount("http 503", 3, "no room"),
        FaultCount("short stream", 2, "the answer ended without a finish_reason"),
    ]


def test_a_sample_has_the_retry_after_of_its_refusal() -> None:
    engine = Engine(faults={0: "refuse", 1: "html"})
    result = replayed(engine, requests(3))
    assert [sample.retry_after for sample in result.samples] == ["7", None, None]


def test_nobody_there_is_a_failure_of_every_request() -> None:
    async def main(_: asyncio.AbstractEventLoop) -> ReplayResult:
        settings = ReplaySettings(target="http://127.0.0.1:9", model="m")
        return await replay(settings, requests(3))

    result = run(main, seed=0)
    assert [(count.kind, count.requests) for count in result.faults] == [("connect", 3)]
    assert result.figures.window == WHOLE_RUN


def test_nobody_to_tell_the_model_ends_at_once() -> None:
    async def main(_: asyncio.AbstractEventLoop) -> ReplayResult:
        return await replay(ReplaySettings(target="http://127.0.0.1:9"), requests(3))

    with pytest.raises(WireError):
        run(main, seed=0)


def test_a_malformed_url_is_refused_before_anything_is_sent() -> None:
    async def main(_: asyncio.AbstractEventLoop) -> ReplayResult:
        return await replay(ReplaySettings(target="127.0.0.1"), requests(3))

    with pytest.raises(ConfigError, match="--target"):
        run(main, seed=0)


def test_without_usage_the_events_are_the_tokens() -> None:
    result = replayed(Engine(faults={0: "no usage"}), requests(1))
    assert result.figures.output_tokens == 4
    assert result.figures.prompt_tokens is None


@pytest.mark.parametrize("concurrency", [None, 3])
def test_stopping_sends_nothing_more_and_gives_up_what_runs(concurrency: int | None) -> None:
    engine = Engine(step_s=1.0)
    result = replayed(engine, requests(9), stop_after_s=4.5, concurrency=concurrency)
    assert result.interrupted
    figures = result.figures
    assert figures.errors == 0
    assert len(engine.seen) == len(result.samples) == (5 if concurrency is None else 6)
    # 2.97 seconds each.
    assert figures.finished == (2 if concurrency is None else 3)
    assert figures.cancelled == 3
    assert engine.closed_early == 3
    assert engine.running == 0
    assert result.faults == []


@pytest.mark.parametrize("concurrency", [None, 3])
def test_without_a_drain_the_replay_ends_when_the_last_request_is_sent(
    concurrency: int | None,
) -> None:
    # So that no request ends at the moment when the last one is sent.
    engine, drained = (Engine(step_s=0.99, fleet=FLEET) for _ in range(2))
    result = replayed(engine, requests(30), concurrency=concurrency, fleet=True, drain=False)
    assert not result.interrupted
    assert len(engine.seen) == len(result.samples) == 30
    # Three seconds each.
    assert result.figures.cancelled == engine.closed_early == 3
    assert engine.running == 0
    assert result.figures.run_s == pytest.approx(29.0 if concurrency is None else 26.73)
    # What is measured is the same, since the window closes there in any case.
    whole = replayed(drained, requests(30), concurrency=concurrency, fleet=True)
    assert result.fleet == whole.fleet
    for name in ("window", "output_tokens_per_s", "tpot_ms_p95", "ttft_ms_p99", "duration_s"):
        assert getattr(result.figures, name) == getattr(whole.figures, name)


def test_without_a_drain_a_load_that_is_sent_at_once_ends_at_once() -> None:
    result = replayed(Engine(step_s=1.0), requests(3), concurrency=9, drain=False)
    assert result.figures.cancelled == 3
    assert result.figures.window == WHOLE_RUN


def test_stopping_before_the_beginning_sends_nothing() -> None:
    engine = Engine()
    result = replayed(engine, requests(3, apart_s=9.0), stop_after_s=0.0)
    assert result.interrupted
    assert len(engine.seen) <= 1


def test_progress_is_told_while_it_lasts_and_at_the_end() -> None:
    states: list[ReplayProgress] = []
    replayed(Engine(step_s=1.0, faults={3: "refuse"}), requests(4), progress=states.append)
    assert len(states) > 10
    assert states[0] == ReplayProgress(4, 0, 1, 0, 0, 0.0)
    assert [state.ended for state in states] == sorted(state.ended for state in states)
    last = states[-1]
    assert (last.total, last.ended, last.running, last.errors) == (4, 4, 0, 1)
    assert last.token_events == 12
    # The third one ends three seconds after it was sent; the fourth one at once.
    assert last.elapsed_s == pytest.approx(5.0)


FIGURES = FleetFigures(
    mean_imbalance_tokens=1234.5,
    idle_fraction=0.25,
    tokens_per_s=99.0,
    steps=77,
    mean_late_s=0.25,
    late_s=2.0,
)
FLEET = asdict(FIGURES) | {"more": "things"}


def test_the_fleets_figures_are_of_the_window() -> None:
    engine = Engine(step_s=0.5, fleet=FLEET)
    result = replayed(engine, requests(20), fleet=True)
    assert result.fleet == FIGURES
    assert result.faults == []
    start_s = result.start_ns / 1e9
    # Once to see that they are there; then from the end of the second request to the last one sent.
    assert [(path, round(time_s - start_s, 6)) for time_s, path in engine.calls] == [
        ("POST /emulation/stats/reset", 0.0),
        ("POST /emulation/stats/reset", 2.5),
        ("GET /emulation/stats", 19.0),
    ]


def test_the_fleets_figures_of_a_short_run_are_of_the_whole() -> None:
    engine = Engine(step_s=0.5, fleet=FLEET)
    result = replayed(engine, requests(2, apart_s=0.1), fleet=True)
    assert result.figures.window == WHOLE_RUN
    assert result.fleet is not None
    start_s = result.start_ns / 1e9
    assert [(path, round(time_s - start_s, 6)) for time_s, path in engine.calls] == [
        ("POST /emulation/stats/reset", 0.0),
        ("GET /emulation/stats", 1.6),
    ]


def test_a_window_without_a_finish_gives_no_fleet_figures() -> None:
    engine = Engine(step_s=0.5, fleet=FLEET)
    result = replayed(engine, requests(2, apart_s=10.0), fleet=True)
    assert result.figures.window == WHOLE_RUN
    # They were reset when the window opened, and are not of the whole run.
    assert len(engine.calls) == 3
    assert result.fleet is None
    assert result.faults == []


def test_without_a_fleet_at_the_url_nothing_is_replayed() -> None:
    engine = Engine(fleet_status=404, fleet={"error": {"message": "Not Found"}})
    with pytest.raises(TargetError, match="/emulation/stats/reset: http 404: Not Found"):
        replayed(engine, requests(2), fleet=True)
    assert engine.seen == []


@pytest.mark.parametrize(
    "fleet",
    [[], {}, {"idle_fraction": "much"}, {**FLEET, "steps": None}, {**FLEET, "steps": math.nan}],
)
def test_figures_that_cannot_be_read_are_a_failure_and_lose_nothing(fleet: object) -> None:
    result = replayed(Engine(fleet=fleet), requests(3), fleet=True)
    assert result.figures.finished == 3
    assert result.fleet is None
    assert [count.kind for count in result.faults] == ["fleet figures"]


def test_the_same_replay_measures_the_same() -> None:
    def once() -> ReplayResult:
        return replayed(Engine(first_s=0.3, step_s=0.1, faults={2: "reset"}), requests(9))

    assert once() == once()


def test_times_may_be_measured_with_a_finer_clock_than_the_loops() -> None:
    ticks = iter(range(0, 10**12, S))

    async def main(_: asyncio.AbstractEventLoop) -> ReplayResult:
        server = Server(Engine())
        await server.start("127.0.0.1", 0)
        settings = ReplaySettings(target=f"http://127.0.0.1:{server.port}", concurrency=1)
        try:
            return await replay(settings, requests(1, output=1), clock_ns=lambda: next(ticks))
        finally:
            server.close()
            await server.drain()

    result = run(main, seed=0)
    (sample,) = result.samples
    # Read for the start, when it is due, when it is sent, its token and its end.
    assert (result.start_ns, sample.due_ns, sample.sent_ns) == (0, 1 * S, 2 * S)
    assert (sample.first_ns, sample.end_ns) == (3 * S, 4 * S)
