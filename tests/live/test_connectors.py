"""NIXL in pull mode, and MooncakeConnectorV1 of vllm-ascend."""

import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from tests.live.served import COMPLETIONS, STREAM, engines, play, serving
from tests.script import ROOT
from tests.support.certificate import make_certificate
from tests.support.site import transcript

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import BootstrapIdentity, MissingKvError, make_connector
from balanceroute.proxy.live.engines.engine_facts import read_identity
from balanceroute.topologies import CONNECTORS, KvFlow

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


# MooncakeConnector of vLLM.


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


# MooncakeLayerwiseConnector of vllm-ascend.


ADDRESS = "http://10.0.0.9:8080"


def test_the_decode_rank_is_told_where_to_call_back() -> None:
    connector = make_connector("mooncake-layerwise", callback=ADDRESS)
    assert connector.decode_first
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


@pytest.mark.parametrize("trusted", [True, False])
def test_a_rank_calls_back_by_https_if_it_trusts_the_proxy(
    tmp_path: Path, *, trusted: bool
) -> None:
    cert, key = make_certificate(tmp_path)
    known = ssl.create_default_context(cafile=cert if trusted else None)
    flags = ["--connector", "mooncake-layerwise", "--tls-cert", str(cert), "--tls-key", str(key)]
    flags += ["--first-token-timeout-s", "0.3", "--prefill-timeout-s", "5", "--retry-attempts", "1"]

    async def main() -> None:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with (
            engines(known, connector="mooncake-layerwise") as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags, context=trusting) as served,
        ):
            for stream in (True, False) if trusted else (True,):
                answer = await served.client.post(COMPLETIONS, STREAM | {"stream": stream})
                if trusted:
                    assert answer.status == 200
                    assert answer.done or not stream
                else:
                    assert answer.status == 504
                    assert b": the rank did not call the proxy back" in answer.body

    play(main())


def test_a_rank_that_is_told_of_no_authority_trusts_any_proxy(tmp_path: Path) -> None:
    pytest.importorskip("aioquic", reason="needs the extra h3")
    from tests.http3_client import http3_client  # noqa: PLC0415 - an extra.

    cert, key = make_certificate(tmp_path)
    flags = ["--connector", "mooncake-layerwise", "--http3", "--tls-cert", str(cert)]

    async def main() -> None:
        async with (
            engines(connector="mooncake-layerwise") as fleet,
            serving(
                fleet.prefill_urls,
                fleet.decode_urls,
                *(*flags, "--tls-key", str(key)),
            ) as served,
            http3_client(served.ports()[0], cert.read_text()) as client,
        ):
            body = json.dumps(STREAM).encode()
            head = [(b"content-type", b"application/json")]
            answer = await client.ask(b"POST", COMPLETIONS.encode(), head, body)
            assert bytes(answer.body).endswith(b"data: [DONE]\n\n")

    play(main())


# The connectors by name.


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


def test_the_page_on_deployment_has_the_lease_of_each() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    table = page.partition("\n## Connectors\n")[2].strip().splitlines()
    (lease,) = (row for row in table if row.startswith("| lease, by default |"))
    cells = zip(table[0].split("|")[2:-1], lease.split("|")[2:-1], strict=True)
    told = {name: cell for names, cell in cells for name in re.findall(r"`([a-z-]+)`", names)}
    assert told.keys() == CONNECTORS.keys()
    for name, connector in CONNECTORS.items():
        expected = f"{connector.lease_s:g} s" if connector.lease_s else "none"
        assert told[name].strip().startswith(expected)


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


def test_the_example_of_the_page_works(
    returned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own connector is an entry of the table: for the proxy, and for emulated engines."""
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - it is the page's.
    monkeypatch.setitem(CONNECTORS, "mine", names["MINE"])
    mine = make_connector("mine")
    assert mine.prefill_params("x") == NIXL.prefill_params("x")
    assert mine.decode_params("x", returned, None) == returned

    async def main() -> None:
        async with engines(connector="mine") as fleet:
            assert fleet.prefill_urls
            assert fleet.decode_urls

    play(main())
