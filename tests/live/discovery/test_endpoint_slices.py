"""Engines in EndpointSlices."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from tests.live.discovery.api_server import endpoint, slice_of
from tests.live.opcodes import counted

from balanceroute.proxy.live.discovery.kubernetes import ExpiredError, Slices, WatchError
from balanceroute.proxy.live.engines.instances import Role


def listed(*slices: dict[str, Any], role: Role | None = None) -> Slices:
    known = Slices(role)
    known.replace([{"metadata": {"resourceVersion": "7"}, "items": list(slices)}])
    return known


def line(kind: str, thing: dict[str, Any], version: int = 8) -> bytes:
    thing.setdefault("metadata", {})["resourceVersion"] = str(version)
    return json.dumps({"type": kind, "object": thing}).encode()


def shown(known: Slices) -> list[str]:
    """Return the engines, by their addresses."""
    return [
        f"{one.target.role.value} {one.target.url}"
        + ("" if one.ready else " not ready")
        + (" leaving" if one.leaving else "")
        for one in sorted(known.view().values(), key=lambda one: one.target.url)
    ]


def test_roles_are_those_of_the_label_and_the_port_is_that_of_the_api() -> None:
    known = listed(
        slice_of("p", "prefill", [endpoint("10.0.0.1")]),
        slice_of("d", "decode", [endpoint("10.0.0.2"), endpoint("fd00::3")], port=8200),
    )
    assert known.version == "7"
    assert shown(known) == [
        "prefill http://10.0.0.1:8000",
        "decode http://10.0.0.2:8200",
        "decode http://[fd00::3]:8200",
    ]


def test_conditions_tell_who_is_ready_and_who_is_leaving() -> None:
    known = listed(
        slice_of("d", "decode", [endpoint("10.0.0.1", ready=False)]),
        slice_of("e", "decode", [endpoint("10.0.0.2", ready=False, terminating=True)]),
        # Without conditions an endpoint is ready.
        slice_of("f", "decode", [{"addresses": ["10.0.0.3"]}]),
    )
    assert shown(known) == [
        "decode http://10.0.0.1:8000 not ready",
        "decode http://10.0.0.2:8000 not ready leaving",
        "decode http://10.0.0.3:8000",
    ]


def test_a_pod_with_addresses_of_two_families_is_one_engine() -> None:
    four, six = endpoint("10.0.0.1"), endpoint("fd00::1")
    six["targetRef"] = four["targetRef"]
    alone = endpoint("fd00::2")
    known = listed(
        slice_of("a6", "decode", [six, alone], family="IPv6"), slice_of("b4", "decode", [four])
    )
    both = ["decode http://10.0.0.1:8000", "decode http://[fd00::2]:8000"]
    assert shown(known) == both
    assert known.apply(line("DELETED", slice_of("b4", "decode", [])))
    assert shown(known) == ["decode http://[fd00::1]:8000", both[1]]
    assert known.apply(line("ADDED", slice_of("b4", "decode", [four])))
    assert shown(known) == both


def test_an_endpoint_in_two_slices_leaves_if_one_says_so() -> None:
    leaving = endpoint("10.0.0.1", terminating=True)
    for pair in ([leaving], [endpoint("10.0.0.1")]), ([endpoint("10.0.0.1")], [leaving]):
        known = listed(
            *(slice_of(name, "decode", one) for name, one in zip("ab", pair, strict=True))
        )
        assert shown(known) == ["decode http://10.0.0.1:8000 leaving"]


def test_a_pod_that_gets_the_address_of_one_that_ends_waits_for_its_end() -> None:
    old, new = endpoint("10.0.0.1", terminating=True), endpoint("10.0.0.1", ready=False)
    new["targetRef"] = {"uid": "new"}
    known = listed(slice_of("d", "decode", [old, new]))
    assert shown(known) == ["decode http://10.0.0.1:8000 leaving"]
    known.apply(line("MODIFIED", slice_of("d", "decode", [new])))
    assert shown(known) == ["decode http://10.0.0.1:8000 not ready"]
    known.apply(line("MODIFIED", slice_of("d", "decode", [])))
    assert shown(known) == []


def test_random_changes_leave_what_a_list_of_the_same_slices_gives() -> None:
    rng, known = random.Random(3), listed()
    slices: dict[str, dict[str, Any]] = {}
    for _ in range(400):
        name, family = rng.choice([("a", "IPv4"), ("b", "IPv4"), ("c", "IPv6"), ("d", "IPv6")])
        kind = "DELETED" if name in slices and rng.random() < 0.2 else "MODIFIED"
        ends = []
        for pod in rng.sample(range(5), rng.randrange(4)):
            # Two pods have the same address.
            host = f"10.0.0.{pod % 4}" if family == "IPv4" else f"fd00::{pod % 4}"
            end = endpoint(host, ready=rng.random() < 0.9, terminating=rng.random() < 0.3)
            ends.append(end | {"targetRef": {"uid": f"pod {pod}"}})
        one = slice_of(name, rng.choice(["prefill", "decode"]), ends, family=family)
        known.apply(line(kind, one))
        slices.pop(name, None)
        if kind == "MODIFIED":
            slices[name] = one
        assert set(shown(known)) == set(shown(listed(*slices.values())))


def test_a_change_costs_what_it_touches() -> None:
    def cost(slices: int) -> int:
        ends = [[endpoint(f"10.0.{number // 200}.{number % 200}")] for number in range(slices)]
        known = listed(*(slice_of(f"d{at}", "decode", end) for at, end in enumerate(ends)))
        change = line("MODIFIED", slice_of("d0", "decode", [endpoint("10.9.0.1")]))
        opcodes = Counter[str]()
        with counted(opcodes):
            known.apply(change)
            view = known.view()
        assert len(view) == slices
        return opcodes.total()

    assert cost(10) == cost(1_000)


@pytest.mark.parametrize(
    "change",
    [
        {"ports": None},
        {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 2}]},
        {"ports": [{"name": "api"}]},
        {"ports": [{"name": "api", "port": 70_000}]},
        {"ports": {"api": 1}},
        {"ports": "api"},
        {"endpoints": 5},
        {"endpoints": ["10.0.0.1"]},
        {"addressType": "FQDN"},
        {"endpoints": None},
        {"endpoints": [{"addresses": []}, {"addresses": ["a b"]}, {}]},
    ],
)
def test_what_cannot_be_reached_is_left_out(change: dict[str, Any]) -> None:
    assert shown(listed(slice_of("d", "decode", [endpoint("10.0.0.1")]) | change)) == []


def test_a_slice_without_a_role_is_left_out_unless_the_setting_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = slice_of("d", "both", [endpoint("10.0.0.1")])
    known = listed(one)
    assert shown(known) == shown(known) == []
    assert caplog.messages == ["an EndpointSlice is left out"]
    assert shown(listed(one, role=Role.DECODE)) == ["decode http://10.0.0.1:8000"]


def test_the_only_port_needs_no_name_and_may_have_tls() -> None:
    one = slice_of("d", "decode", [endpoint("10.0.0.1")])
    one["ports"] = [{"port": 8443, "appProtocol": "https"}]
    assert shown(listed(one)) == ["decode https://10.0.0.1:8443"]


def test_changes_are_applied_and_bookmarks_move_the_version() -> None:
    known = listed(slice_of("d", "decode", [endpoint("10.0.0.1")]))
    assert known.apply(line("ADDED", slice_of("e", "decode", [endpoint("10.0.0.2")]), 8))
    assert known.apply(line("MODIFIED", slice_of("d", "decode", [endpoint("10.0.0.3")]), 9))
    assert shown(known) == ["decode http://10.0.0.2:8000", "decode http://10.0.0.3:8000"]
    assert known.apply(line("DELETED", slice_of("d", "decode", []), 10))
    assert not known.apply(line("BOOKMARK", {}, 15))
    assert known.version == "15"
    assert shown(known) == ["decode http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("code", "error"), [(410, ExpiredError), (500, WatchError), (None, WatchError)]
)
def test_an_error_in_a_watch_is_raised(code: int | None, error: type[Exception]) -> None:
    known = listed()
    status = {"kind": "Status", "code": code, "message": "too old"}
    with pytest.raises(error, match="too old"):
        known.apply(json.dumps({"type": "ERROR", "object": status}).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"type": "ERROR", "object": []}',
        b'{"type": "ADDED", "object": {"metadata": {}}}',
        b"[" * 10**5,
    ],
)
def test_what_is_no_change_is_an_error(text: bytes) -> None:
    with pytest.raises(WatchError, match="no change of an EndpointSlice"):
        listed().apply(text)


@pytest.mark.parametrize("page", [{}, {"items": [{}], "metadata": {"resourceVersion": "1"}}, []])
def test_what_is_no_list_is_an_error(page: Any) -> None:
    with pytest.raises(WatchError, match="no list of EndpointSlices"):
        Slices(None).replace([page])
