"""A relay's request gives its slot back in whatever way its end is told, or is not told at all."""

from typing import TYPE_CHECKING

import pytest
from tests.live.processes.test_crossing import NUMBER, Relay

from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live.conftest import Play, Site

    from balanceroute.proxy.live.request.live_request import LiveRequest


async def decoding(site: "Site", *, started: bool) -> "tuple[Relay, LiveRequest]":
    """Return a relay with a request that a rank has."""
    relay = Relay(site)
    request = relay.arrive()
    await relay.hears(to_relay.StartPrefill)
    relay.say(from_relay.PrefillDone(NUMBER, 1, 3, None, True, 0))
    await relay.hears(to_relay.StartDecode)
    if started:
        relay.say(from_relay.DecodeStarted(NUMBER, 2, 0))
    scheduler = site.world.scheduler
    assert (len(scheduler.ledger), int(scheduler.ledger.bound.sum())) == (1, 1)
    return relay, request


def ended(relay: Relay, how: str, *, answered: bool = False) -> from_relay.SessionEnded:
    record = RequestRecord("r", "/v1/completions", 0, 0.0)
    record.end(Outcome.OK, "", relay.site.loop.time())
    return from_relay.SessionEnded(NUMBER, record, how, answered)  # type: ignore[arg-type]


def finished(relay: Relay) -> None:
    relay.say(ended(relay, "finished"))


def unsaid(relay: Relay) -> None:
    """It takes the request for one that the scheduler process has ended."""
    relay.say(ended(relay, ""))


def twice(relay: Relay) -> None:
    relay.say(ended(relay, "finished"), ended(relay, "failed"))


def before_its_beginning(relay: Relay) -> None:
    """What should have come first comes last."""
    relay.say(ended(relay, "finished", answered=True), from_relay.DecodeStarted(NUMBER, 2, 0))


def behind_a_message_that_makes_no_sense(relay: Relay) -> None:
    relay.say(from_relay.DecodeStarted(NUMBER, 2, 0), from_relay.DecodeStarted(NUMBER, 2, 0))
    relay.say(ended(relay, "finished"))


def dies(relay: Relay) -> None:
    """It has ended the request, and the message is lost with it."""
    relay.desk.gone()


def dies_behind_its_end(relay: Relay) -> None:
    relay.say(ended(relay, "finished"))
    relay.desk.gone()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        finished,
        unsaid,
        twice,
        before_its_beginning,
        behind_a_message_that_makes_no_sense,
        dies,
        dies_behind_its_end,
    ],
)
def test_the_slot_is_free_again(
    play: "Play",
    end: "Callable[[Relay], None]",
    started: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: "Site") -> None:
        relay, request = await decoding(site, started=started)
        end(relay)
        scheduler = site.world.scheduler
        assert not scheduler.requests
        assert not len(scheduler.ledger)
        assert not scheduler.ledger.bound.any()
        assert not scheduler.ledger.loads.any()
        scheduler.ledger.check()
        assert sum(scheduler.prefillers.held_tokens) == 0
        assert request.number not in site.world.plane.deployment.driver.sessions
        assert not relay.desk.requests
        caplog.clear()  # What makes no sense is logged as an error.

    play(scenario, relays=1)
