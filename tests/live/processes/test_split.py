"""Relays and a scheduler process in one virtual-time loop: whole requests, and what both sides count."""

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.core.events import RequestArrived
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import VERSION, FrameError
from balanceroute.proxy.live.processes.stream_counts import PROGRESS_S
from balanceroute.proxy.live.telemetry.process_log import LOGGER, set_log_level
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.testing.chaos.split_world import SplitWorld

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

    from balanceroute.proxy.testing.chaos.scheduler_watch import Step
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Request

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 20, "ignore_eos": True}
STREAM = BODY | {"stream": True}
EMBEDDING = {"model": "tiny", "input": "t1 t2"}


def split(site: "Site") -> SplitWorld:
    assert isinstance(site.world, SplitWorld)
    return site.world


def ports(site: "Site") -> list[int]:
    return [front.server.port for front in site.world.fronts]


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-layerwise"])
def test_whole_requests_are_served_by_any_relay(play: "Play", connector: str) -> None:
    async def scenario(site: "Site") -> None:
        alone = await site.ask("decode/0", COMPLETIONS, BODY)
        exchanges = [
            site.send(COMPLETIONS, values, port=port)
            for port in ports(site)
            for values in (BODY, STREAM)
        ]
        for exchange in exchanges:
            await exchange.end()
            assert exchange.status == 200
            assert exchange.text == alone.text
        assert all(exchange.done for exchange in exchanges[1::2])
        await site.rest()
        assert [record.outcome for record in site.world.ended] == [Outcome.OK] * 4
        assert all(record.prefiller and record.rank for record in site.world.ended)
        assert all(relay.host.idle for relay in split(site).relays)

    play(scenario, relays=2, connector=connector)


def test_requests_are_numbered_in_order_of_arrival_over_all_relays(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        numbers: list[int] = []

        def saw(step: "Step") -> None:
            if isinstance(step.event, RequestArrived):
                numbers.append(step.event.request)

        site.world.observer.watch = saw
        ids = []
        for turn in range(6):
            name = f"r{turn}"
            headers = [(b"x-request-id", name.encode())]
            site.send(COMPLETIONS, BODY, headers=headers, port=ports(site)[turn % 2])
            await site.until(lambda: len(numbers) == turn + 1)  # noqa: B023
            ids.append(name)
        assert numbers == list(range(6))
        sessions = site.world.plane.deployment.driver.sessions
        assert [one.record.request_id for one in sessions.values()] == ids
        await site.until(lambda: len(site.world.ended) == 6)

    play(scenario, relays=2)


def test_two_requests_of_one_name_are_two_for_the_engines(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        headers = [(b"x-request-id", b"same")]
        both = [site.send(COMPLETIONS, STREAM, headers=headers, port=p) for p in ports(site)]
        for exchange in both:
            await exchange.end()
            assert exchange.header(b"x-request-id") == b"same"
        names = Counter(seen.header(b"x-request-id") for seen in site.received("decode"))
        assert len(names) == 2

    play(scenario, relays=2)


def test_what_is_refused_or_passed_through_is_counted_and_logged_once(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        assert (await site.post(COMPLETIONS, {"model": 3})).status == 400
        assert (await site.post(COMPLETIONS, BODY | {"model": "absent"})).status == 404
        assert (await site.post("/v1/embeddings", EMBEDDING)).status == 200
        site.world.plane.deployment.driver.draining = True
        refused = await site.post(COMPLETIONS, BODY)
        assert refused.status == 503
        assert b"shutting down" in refused.body
        assert refused.header(b"retry-after") == b"1"
        await site.until(lambda: len(site.world.ended) == 4)
        page = site.world.plane.metrics.render().decode()
        counted = {
            line.split('status="')[1].split('"')[0]: line.split()[-1]
            for line in page.splitlines()
            if line.startswith("balanceroute_requests_total")
        }
        assert counted == {"400": "1.0", "404": "1.0", "200": "1.0", "503": "1.0"}
        assert sorted(record.status for record in site.world.ended) == [200, 400, 404, 503]

    play(scenario, relays=2, flags={"model": ["tiny"]})


def test_pages_tell_of_all_processes(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        running = [site.send(COMPLETIONS, STREAM, port=port) for port in ports(site)]
        for exchange in running:
            await exchange.until_events(2)
        assert (await site.get("/load")).json == {"server_load": 2}
        assert (await site.get("/ready")).status == 200
        assert [card["id"] for card in (await site.get("/v1/models")).json["data"]] == ["tiny"]
        for exchange in running:
            await exchange.end()
        await asyncio.sleep(1.0)
        page = (await site.get("/metrics")).body.decode()
        assert 'balanceroute_requests_total{endpoint="/v1/completions"' in page
        gaps = page.split("balanceroute_inter_token_latency_seconds_count ")[1].split()[0]
        # Each stream has a gap less than tokens.
        assert float(gaps) == 2 * 19

    play(scenario, relays=2)


def test_progress_is_told_and_ends_with_the_stream(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        exchange = site.send(COMPLETIONS, STREAM)
        await exchange.until_events(10)
        await asyncio.sleep(2 * PROGRESS_S + 0.3)
        (request,) = site.world.plane.deployment.driver.sessions.values()
        assert request.emitted_tokens >= 10
        assert request.rounds == request.emitted_tokens
        await exchange.end()

    play(scenario, relays=1, step_base_ns=50_000_000.0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_everywhere(play: "Play", stream: bool) -> None:
    async def scenario(site: "Site") -> None:
        exchange = site.send(COMPLETIONS, BODY | {"stream": stream, "max_tokens": 2000})
        await site.until(lambda: len(site.received("decode")) == 1)
        assert exchange.call is not None
        exchange.call.abort()
        await site.until(lambda: len(site.world.ended) == 1, limit_s=2.0)
        assert site.world.ended[0].outcome is Outcome.CANCELLED
        await site.rest(2.0)

    play(scenario, relays=2)


def test_an_engine_that_is_drained_or_added_is_known_to_relays(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        roster = site.world.plane.deployment.roster
        url = site.fleet.engine("prefill/0").url
        roster.drain(Role.PREFILL, url)
        await site.until(
            lambda: all(len(relay.mirror.instances.up()) == 1 for relay in split(site).relays)
        )
        for port in ports(site):
            assert (await site.send(COMPLETIONS, BODY, port=port).end()).status == 200
        assert {seen.engine for seen in site.received("prefill")} == {"prefill/1"}
        await roster.add(Role.PREFILL, url, ranks=None, bootstrap=None)
        await site.until(
            lambda: all(len(relay.mirror.instances.up()) == 2 for relay in split(site).relays)
        )

    play(scenario, relays=2)


def test_an_engine_is_told_once_to_each_scheduler_process(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        (relay,) = split(site).relays
        seen: list[from_relay.EngineSeen] = []
        send = relay.host.uplink.send

        def tapped(message: from_relay.FromRelay) -> None:
            if isinstance(message, from_relay.EngineSeen):
                seen.append(message)
            send(message)

        relay.host.uplink.send = tapped  # type: ignore[method-assign]
        for _ in range(3):
            assert (await site.post(COMPLETIONS, BODY)).status == 200
        (first,) = seen
        assert split(site).kill_scheduler(0.5)
        await site.until(lambda: not relay.host.uplink.connected)
        await site.until(lambda: relay.host.uplink.connected)
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        assert seen == [first, first]
        (prefiller,) = site.world.plane.deployment.roster.instances.prefillers
        assert len(prefiller.engines) == 1

    play(scenario, relays=1, prefillers=1)


def test_relays_log_as_much_as_was_ordered(play: "Play", caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: "Site") -> None:
        said: list[to_relay.ToRelay] = []
        log = logging.getLogger(LOGGER)
        split(site).app.connect(said.extend).take([from_relay.Hello(VERSION, 5, "the same")])
        assert (await site.admin("/admin/log-level", {"level": "error"})).status == 200
        await asyncio.sleep(0.0)
        told = [one for one in said if isinstance(one, to_relay.LogLevel)]
        assert told[-1].level == "error"
        set_log_level("info")  # A relay has a log of its own, but here.
        split(site).relays[0].take(told[-1:])
        assert log.level == logging.ERROR

    caplog.set_level(logging.INFO, LOGGER)  # And back at the end.
    play(scenario, relays=1)


@pytest.mark.parametrize("settings", ["the same", "other"])
def test_a_relay_says_hello_and_nothing_else_until_it_is_welcome(
    play: "Play", settings: str
) -> None:
    async def scenario(site: "Site") -> None:
        hello: from_relay.FromRelay = from_relay.Hello(VERSION, 5, settings)
        more: from_relay.FromRelay = from_relay.Resumed()
        for said in ([more], [hello, more], [more, hello]):
            with pytest.raises(FrameError, match="says Hello first"):
                split(site).app.connect(lambda _: None).take(said)
        desk = split(site).app.connect(lambda _: None)
        desk.take([hello])
        if settings == "the same":
            desk.take([more])
        else:
            with pytest.raises(FrameError, match="until it is welcome"):
                desk.take([more])

    play(scenario, relays=1)


def test_a_relay_with_other_settings_is_not_welcome(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        said: list[to_relay.ToRelay] = []
        for hello in (
            from_relay.Hello(VERSION, 1, "other"),
            from_relay.Hello(99, 1, "the same"),
            from_relay.Hello(VERSION, 0, "the same"),
        ):
            split(site).app.connect(said.extend).take([hello])
        await asyncio.sleep(0.0)
        reasons = [one.reason for one in said if isinstance(one, to_relay.Unwelcome)]
        assert reasons == [
            "the relay has other settings",
            f"the relay speaks version 99, the scheduler {VERSION}",
            "relay 0 is connected already",
        ]

    play(scenario, relays=1)


def test_a_stream_that_breaks_before_its_first_token_is_told_of(play: "Play") -> None:
    def answer(engine: str, request: "Request", reply: "Reply") -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n')
        # Later than what opens an answer waits for what follows.
        asyncio.get_running_loop().call_later(1.0, reply.abort)

    async def scenario(site: "Site") -> None:
        site.handlers[b"/v1/chat/completions"] = answer
        # One engine answers it, without a prefill.
        values = {"messages": [], "prompt_logprobs": 1, "n": 2, "stream": True}
        exchange = await site.send("/v1/chat/completions", values).end()
        assert exchange.status == 200
        await site.until(lambda: bool(site.world.ended))
        (record,) = site.world.ended
        assert (record.outcome, record.output_tokens) == (Outcome.UPSTREAM_ERROR, 0)

    play(scenario, relays=1)
