"""What is excused where a process was killed, or an engine was slow."""

from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace
from tests.support.chaos.audit import is_excused, may_be_killed
from tests.support.chaos.faults import Act, Injection

from balanceroute.proxy.lab.emulate.leases import EndedLease, LeaseEnd, Misread
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

WELL = RequestRecord("r", "/v1/completions", 5, 0.0, outcome=Outcome.OK, status=200)


def test_of_requests_that_repeat_an_id_nobody_tells_which_one_was_killed() -> None:
    killed = replace(WELL, outcome=Outcome.INTERNAL_ERROR)
    assert may_be_killed([killed, WELL], sent=2)
    assert may_be_killed([WELL], sent=2)
    assert not may_be_killed([WELL, WELL], sent=2)
    assert may_be_killed([], sent=1)
    assert not may_be_killed([replace(WELL, outcome=Outcome.UPSTREAM_ERROR)], sent=1)


# Granted at 11, ended at 12; the run began at 10.
EXPIRED = EndedLease(LeaseEnd.EXPIRED, 11.0, 12.0, short=False)


@pytest.mark.parametrize(
    ("lease", "arrived_s", "excused"),
    [
        (EXPIRED, 12.0, True),
        (EXPIRED, 12.1, False),
        (EndedLease(LeaseEnd.EXPIRED, 11.0, 12.0, short=True), 12.1, True),
        (EndedLease(LeaseEnd.PULLED, 11.0, 12.0, short=True), 11.5, False),
        (None, 11.5, False),
    ],
)
def test_an_engine_excuses_a_misread_that_had_the_request_in_time(
    lease: EndedLease | None, arrived_s: float, *, excused: bool
) -> None:
    misread = Misread("r", lease, "decode/1", arrived_s)
    assert is_excused(misread, [], 10.0) == excused
    assert is_excused(replaced(misread, again=True), [], 10.0)


def test_only_the_wire_on_which_a_request_came_late_excuses_a_misread() -> None:
    misread = Misread("r", EXPIRED, "decode/1", 13.0, prefiller="prefill/0")
    for role, engine, start_s, end_s, excused in (
        (Role.DECODE, 1, 0.0, 9.0, True),
        (Role.DECODE, 1, 3.0, 9.0, True),
        (Role.DECODE, 1, 3.1, 9.0, False),  # It had arrived.
        (Role.DECODE, 1, 0.0, 1.0, True),
        (Role.DECODE, 1, 0.0, 0.9, False),  # There was nothing to send yet.
        (Role.DECODE, 0, 0.0, 9.0, False),
        (Role.PREFILL, 1, 0.0, 9.0, False),
        (Role.PREFILL, 0, 0.0, 9.0, True),  # Its answer may have come late.
    ):
        silent = Injection("is silent", Act.SILENCE, role, engine, start_s, end_s)
        assert is_excused(misread, [silent], 10.0) == excused
    for act in (Act.SUSPENSION, Act.STANDSTILL, Act.BOARD):
        other = Injection("another", act, Role.DECODE, 1, 0.0, 9.0, {"delay_s": 1.0})
        assert not is_excused(misread, [other], 10.0)
