"""`balanceroute replay --http3`: the same samples over one connection of HTTP/3."""

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from tests.lab.replay.test_replay_cli import whole
from tests.support.certificate import CERT
from tests.support.virtual.datagrams import ThinLinkSettings, UdpRelay
from tests.wire.http3.site import http3_site

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.lab.replay.driver import replay
from balanceroute.proxy.lab.replay.requests import PlannedRequest, ReplaySettings
from balanceroute.proxy.wire.messages import HttpRequest, Reply, ServerLimits


def test_a_replay_over_http3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "authority.pem"
    path.write_text(CERT)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    asked: list[HttpRequest] = []

    def answer(request: HttpRequest, reply: Reply) -> None:
        asked.append(request)
        whole(request, reply)

    async def run() -> None:
        async with http3_site(answer, tmp_path) as site:
            target = f"https://127.0.0.1:{site.server.port}"
            settings = ReplaySettings(target=target, http3=True, concurrency=4)
            result = await replay(settings, [PlannedRequest(n, 0, 20, 3) for n in range(20)])
            assert result.model == "tiny"
            assert [sample.events for sample in result.samples] == [3] * 20
            assert not result.faults
            peers = {request.peer for request in asked}
            assert len(peers) == 1  # All of them, and the first one, over one connection.
            assert json.loads(asked[-1].body)["max_tokens"] == 3

    asyncio.run(run())


def test_a_replay_over_a_link_that_loses_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "authority.pem"
    path.write_text(CERT)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    link = ThinLinkSettings(bits_per_s=20e6, delay_s=0.005, loss=0.03)
    requests = [PlannedRequest(n, 0, 20, 3) for n in range(40)]

    async def run() -> None:
        # If the word that the client leaves is lost, the server waits for so long.
        limits = ServerLimits(keep_alive_timeout_s=3.0)
        async with http3_site(whole, tmp_path, limits=limits) as site:
            relay = UdpRelay(site.server.port, seed=1, up=link, down=link)
            target = f"https://127.0.0.1:{await relay.start()}"
            settings = ReplaySettings(target=target, http3=True, concurrency=8)
            result = await replay(settings, requests)
            assert [sample.events for sample in result.samples] == [3] * len(requests)
            assert not result.faults
            assert relay.up.lost + relay.down.lost > 0
        relay.close()

    asyncio.run(run())


def test_http3_needs_https(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--target", "http://127.0.0.1:9", "--trace", "t", "--http3"]) == 2
    assert "--http3: needs a --target of https" in capsys.readouterr().err
