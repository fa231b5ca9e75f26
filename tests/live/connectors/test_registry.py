"""The connectors by name."""

import pytest

from balanceroute.proxy.live.connectors import CONNECTORS, make_connector


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
    connector = make_connector(name)
    assert connector.name == name
    assert connector.lease_s == lease_s
    assert connector.recomputes is recomputes
    assert connector.decode_first is decode_first


def test_there_is_no_other_connector() -> None:
    assert sorted(CONNECTORS) == ["mooncake", "mooncake-ascend", "mooncake-layerwise", "nixl"]
    with pytest.raises(KeyError):
        make_connector("nixl-push")
