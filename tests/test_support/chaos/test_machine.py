"""What the proxy's machine fails to give it: each kind of fault, and judges that find what they look for."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.chaos.faults import Act, Injection
from tests.support.chaos.machine import KeyFile, Naming, Spoiling
from tests.test_support.chaos.test_fault_kinds import (
    assert_nobody_noticed,
    injection,
    roles,
    run_with,
)

from balanceroute.proxy.live import proxy
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome

FULL = Injection("has a full disk", Act.DISK, Role.DECODE, 0, 0.1, 1.0, policy="jsq")


@roles
@pytest.mark.parametrize(
    "naming",
    [Naming.FAILS, Naming.GONE, Naming.SILENT, Naming.SILENT_TOO, Naming.REFUSING_TOO],
    ids=lambda naming: naming.name.lower(),
)
def test_a_name_that_had_an_address_costs_no_request(roles: Sequence[Role], naming: Naming) -> None:
    names = (injection(role, Act.NAME, naming=naming) for role in roles)
    assert_nobody_noticed(run_with(*names))


@pytest.mark.parametrize("naming", [Naming.ELSEWHERE, Naming.FLAPS], ids=["elsewhere", "flaps"])
def test_a_name_that_points_elsewhere_costs_only_its_engine(naming: Naming) -> None:
    report = run_with(injection(Role.PREFILL, Act.NAME, naming=naming))
    assert report.outcomes[Outcome.OK.value] > 0


def test_a_lack_of_descriptors_passes() -> None:
    report = run_with(injection(Role.DECODE, Act.DESCRIPTORS, end_s=0.5))
    assert report.faults["proxy: fault"] == 1
    assert report.outcomes[Outcome.OK.value] > 0
    assert report.outcomes.keys() <= {Outcome.OK.value, Outcome.UPSTREAM_ERROR.value}


@pytest.mark.parametrize("spoiling", Spoiling, ids=lambda spoiling: spoiling.name.lower())
def test_a_bad_file_of_a_key_is_refused(spoiling: Spoiling) -> None:
    assert_nobody_noticed(run_with(injection(Role.DECODE, Act.KEYS, spoiling=spoiling)))


def test_a_bad_file_of_a_key_that_is_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyFile, "spoil", lambda *_: None)  # So the file is good.
    with pytest.raises(AssertionError, match="keys: a bad file was taken"):
        run_with(injection(Role.DECODE, Act.KEYS, spoiling=Spoiling.EMPTY))


def test_an_order_for_a_full_disk_is_kept_later() -> None:
    assert_nobody_noticed(run_with(FULL))


def test_an_order_that_is_not_kept_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def try_never(keeper: OrderStore) -> None:
        del keeper
        await asyncio.Event().wait()

    monkeypatch.setattr(proxy, "keep_trying", try_never)
    with pytest.raises(AssertionError, match="disk: "):
        run_with(FULL)
