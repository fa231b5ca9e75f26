"""What is excused where a process was killed."""

from msgspec.structs import replace

from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.chaos.audit import may_be_killed

WELL = RequestRecord("r", "/v1/completions", 5, 0.0, outcome=Outcome.OK, status=200)


def test_of_requests_that_repeat_an_id_nobody_tells_which_one_was_killed() -> None:
    killed = replace(WELL, outcome=Outcome.INTERNAL_ERROR)
    assert may_be_killed([killed, WELL], sent=2)
    assert may_be_killed([WELL], sent=2)
    assert not may_be_killed([WELL, WELL], sent=2)
    assert may_be_killed([], sent=1)
    assert not may_be_killed([replace(WELL, outcome=Outcome.UPSTREAM_ERROR)], sent=1)
