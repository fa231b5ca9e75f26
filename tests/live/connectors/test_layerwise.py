"""MooncakeLayerwiseConnector of vllm-ascend."""

import json
import ssl
from pathlib import Path

import pytest
from tests.live.served import COMPLETIONS, STREAM, engines, play, serving
from tests.support.certificate import make_certificate

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import make_connector

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
