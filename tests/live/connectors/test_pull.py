"""NIXL in pull mode, and MooncakeConnectorV1 of vllm-ascend."""

import json
from typing import Any

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import MissingKvError, make_connector

NIXL = make_connector("nixl")


@pytest.fixture
def returned() -> dict[str, Any]:
    """What a real prefiller returned."""
    answer = json.loads(transcript("nixl_chat_stream_usage_prefill.resp"))
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


@pytest.mark.parametrize("name", ["nixl", "mooncake-ascend"])
def test_the_prefill_leg_is_asked_as_a_real_one_was(name: str) -> None:
    worked = json.loads(transcript("nixl_chat_stream_usage_prefill.req"))["kv_transfer_params"]
    assert json.loads(make_connector(name).prefill_params("xfer-1")) == worked


def test_the_decode_leg_gets_what_a_real_one_got(returned: dict[str, Any]) -> None:
    worked = json.loads(transcript("nixl_chat_stream_usage_decode.req"))["kv_transfer_params"]
    assert NIXL.decode_params("xfer-1", returned, None) == worked
    assert list(NIXL.decode_params("xfer-1", returned, None)) == list(worked)


def test_keys_that_nobody_here_knows_pass_through(returned: dict[str, Any]) -> None:
    known_to_ascend = {"remote_pcp_size": 1, "last_token_id": 7, "num_prompt_blocks": [3]}
    params = make_connector("mooncake-ascend").decode_params("x", returned | known_to_ascend, None)
    assert params == returned | known_to_ascend


def test_no_remote_block_at_all_is_a_full_hit_of_the_decoders_cache(
    returned: dict[str, Any],
) -> None:
    assert NIXL.decode_params("x", returned | {"remote_block_ids": []}, None)


@pytest.mark.parametrize("other", [None, [], "params", 1, True])
def test_no_parameters_is_no_kv(other: object) -> None:
    with pytest.raises(MissingKvError):
        NIXL.decode_params("x", other, None)


@pytest.mark.parametrize(
    "key",
    [
        "do_remote_prefill",
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
    ],
)
def test_a_decoder_is_not_left_to_hang_on_half_of_the_parameters(
    returned: dict[str, Any], key: str
) -> None:
    odd: list[object] = [None, "", False, True, 0, {}, 1.5]
    for value in odd:
        if value is returned[key]:
            continue
        with pytest.raises(MissingKvError):
            NIXL.decode_params("x", returned | {key: value}, None)
    with pytest.raises(MissingKvError):
        NIXL.decode_params("x", {k: v for k, v in returned.items() if k != key}, None)


def test_an_answer_that_echoes_the_request_is_no_kv() -> None:
    with pytest.raises(MissingKvError):
        NIXL.decode_params("x", json.loads(NIXL.prefill_params("x")), None)
