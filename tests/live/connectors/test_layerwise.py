"""MooncakeLayerwiseConnector of vllm-ascend."""

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import make_connector

ADDRESS = "http://10.0.0.9:8080"


def test_the_decode_rank_is_told_where_to_call_back() -> None:
    connector = make_connector("mooncake-layerwise", callback=ADDRESS)
    assert connector.facts.decode_first
    # Keys as in vllm-ascend's layerwise example proxy.
    assert connector.decode_params("t0", None, None) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": "http://10.0.0.9:8080/v1/metaserver/t0",
    }


def test_every_leg_has_an_address_of_its_own() -> None:
    connector = make_connector("mooncake-layerwise", callback=ADDRESS)
    one, other = (connector.decode_params(name, None, None)["metaserver"] for name in "ab")
    assert one != other


def test_without_an_address_there_is_nothing_to_tell() -> None:
    with pytest.raises(ConfigError):
        make_connector("mooncake-layerwise").decode_params("t0", None, None)


def test_the_proxy_does_not_make_up_the_prefill_leg() -> None:
    with pytest.raises(AssertionError):
        make_connector("mooncake-layerwise", callback=ADDRESS).prefill_params("t0")
