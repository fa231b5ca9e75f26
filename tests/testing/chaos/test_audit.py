"""What is excused where a process was killed, or an engine was slow."""

from msgspec.structs import replace

from balanceroute.proxy.emulate.leases import LeaseEnd, Misread
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.chaos.audit import is_excused, may_be_killed
from balanceroute.proxy.testing.chaos.faults import Act, Injection

WELL = RequestRecord("r", "/v1/completions", 5, 0.0, outcome=Outcome.OK, status=200)


def test_of_requests_that_repeat_an_id_nobody_tells_which_one_was_killed() -> None:
    killed = replace(WELL, outcome=Outcome.INTERNAL_ERROR)
    assert may_be_killed([killed, WELL], sent=2)
    assert may_be_killed([WELL], sent=2)
    assert not may_be_killed([WELL, WELL], sent=2)
    assert may_be_killed([], sent=1)
    assert not may_be_killed([replace(WELL, outcome=Outcome.UPSTREAM_ERROR)], sent=1)


def test_only_a_slow_engine_of_its_own_excuses_a_misread() -> None:
    misread = Misread("r", LeaseEnd.EXPIRED, False, 12.0, frozenset({"decode/1", "prefill/0"}))
    for role, engine, start_s, excused in (
        (Role.DECODE, 1, 2.0, True),
        (Role.PREFILL, 0, 1.0, True),
        (Role.DECODE, 1, 2.1, False),  # Later.
        (Role.DECODE, 0, 1.0, False),
        (Role.PREFILL, 1, 1.0, False),
    ):
        slow = Injection("is slow", Act.BOARD, role, engine, start_s, 9.0, {"delay_s": 1.0})
        assert is_excused(misread, [slow], 10.0) == excused
    suspended = Injection("is suspended", Act.SUSPENSION, Role.DECODE, 1, 1.0, 1.0, jump_s=600.0)
    assert not is_excused(misread, [suspended], 10.0)
