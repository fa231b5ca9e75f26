"""MooncakeConnector of vLLM."""

import json

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import BootstrapIdentity, MissingKvError, make_connector
from balanceroute.proxy.live.engines.engine_facts import read_identity

MOONCAKE = make_connector("mooncake")


def test_both_legs_are_asked_as_real_ones_were() -> None:
    prefill = json.loads(transcript("mooncake_chat_nonstream_prefill.req"))["kv_transfer_params"]
    decode = json.loads(transcript("mooncake_chat_nonstream_decode.req"))["kv_transfer_params"]
    transfer = prefill["transfer_id"]
    identity = BootstrapIdentity(decode["remote_engine_id"], decode["remote_bootstrap_addr"])
    assert json.loads(MOONCAKE.prefill_params(transfer)) == prefill
    assert MOONCAKE.decode_params(transfer, None, identity) == decode


def test_the_decode_leg_names_the_engine_that_the_bootstrap_server_named() -> None:
    page = transcript("mooncake_bootstrap_query.resp")
    params = MOONCAKE.decode_params("x", None, read_identity(page, "http://10.0.0.1:8998"))
    assert params["remote_engine_id"] == json.loads(page)["0"]["engine_id"]
    assert params["remote_bootstrap_addr"] == "http://10.0.0.1:8998"


def test_what_the_prefiller_returned_is_not_passed_on() -> None:
    params = MOONCAKE.decode_params(
        "x", {"remote_host": "evil"}, BootstrapIdentity("engine", "http://10.0.0.1:8998")
    )
    assert "evil" not in params.values()
    assert params["transfer_id"] == "x"


def test_a_prefiller_that_nobody_knows_yet_left_no_kv() -> None:
    with pytest.raises(MissingKvError):
        MOONCAKE.decode_params("x", {}, None)
