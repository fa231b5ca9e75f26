"""The connectors by name."""

import pytest

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.topologies import CONNECTORS


@pytest.mark.parametrize(
    ("name", "lease_s", "recomputes", "decode_first"),
    [
        ("nixl", 30.0, False, False),
        ("mooncake", 480.0, False, False),
        ("mooncake-ascend", 480.0, True, False),
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
    assert facts.decode_first is decode_first


def test_there_is_no_other_connector() -> None:
    assert sorted(CONNECTORS) == ["mooncake", "mooncake-ascend", "mooncake-layerwise", "nixl"]
    with pytest.raises(KeyError):
        make_connector("nixl-push")
