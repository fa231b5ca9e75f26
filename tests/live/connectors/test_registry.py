"""The connectors by name."""

import re

import pytest
from tests.script import ROOT

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.topologies import CONNECTORS, KvFlow


@pytest.mark.parametrize(
    ("name", "lease_s", "recomputes", "decode_first"),
    [
        ("nixl", 30.0, False, False),
        ("mooncake", 480.0, False, False),
        ("mooncake-ascend", 480.0, True, False),
        ("mooncake-hybrid", 480.0, True, False),
        ("mooncake-layerwise", None, True, True),
    ],
)
def test_each_connector_says_what_its_engines_do(
    name: str, lease_s: float | None, *, recomputes: bool, decode_first: bool
) -> None:
    facts = make_connector(name).facts
    assert facts is CONNECTORS[name]
    assert facts.lease_s == lease_s
    assert facts.recomputes is recomputes
    assert (facts.flow is KvFlow.DECODE_FIRST) is decode_first


def test_the_page_on_fleets_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| [^|]*\| (?:(\d+) s|\S) \|", page, re.MULTILINE))
    leases = {name: facts.lease_s for name, facts in CONNECTORS.items()}
    assert rows == {name: f"{s:g}" if s else "" for name, s in leases.items()}


def test_there_is_no_other_connector() -> None:
    assert sorted(CONNECTORS) == [
        "mooncake",
        "mooncake-ascend",
        "mooncake-hybrid",
        "mooncake-layerwise",
        "nixl",
    ]
    with pytest.raises(KeyError):
        make_connector("nixl-push")
