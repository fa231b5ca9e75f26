"""Legs that are lost with a reused connection: what is sent again, and what is not."""

import pytest
from tests.live.request.session_site import Site, prefill_answer

from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.request.phases import Phase
from balanceroute.proxy.live.telemetry.record import Leg, Outcome
from balanceroute.proxy.wire.messages import WireFault


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DIRECT])
def test_what_may_be_done_twice_is_sent_again_at_once_on_a_new_connection(leg: Leg) -> None:
    members = {"echo": True} if leg is Leg.DIRECT else {}
    site = Site(members=members, direct="prefill", retry_attempts=1)
    sent = site.prefill()
    told = len(site.fed)
    sent.break_off(WireFault.STALE)
    again = site.last
    assert again is not sent
    assert (again.engine, again.fresh, sent.fresh) == (sent.engine, True, False)
    assert again.values == sent.values
    assert (site.blamed, site.fed[told:], site.budget) == ([], [], 100)
    # Once: what is lost on a new connection is lost.
    again.break_off()
    assert site.blamed
    assert site.session.record.outcome is Outcome.UPSTREAM_ERROR


def test_a_kv_cache_that_may_have_been_pulled_is_computed_again_at_once() -> None:
    site = Site(retry_attempts=2)
    site.to_rank().break_off(WireFault.STALE)
    assert (site.blamed, site.pulls, site.budget) == ([], [], 100)
    assert site.is_in(Phase.QUEUED)
    prefill = site.prefill()
    assert prefill.fresh
    prefill.answer(200, prefill_answer())
    decode = site.decode(1)
    assert decode.fresh
    decode.break_off()  # Which counts as any other.
    assert site.blamed == [("d1", Fault.RESET)]
    site.back_off()
    assert site.budget == 99
