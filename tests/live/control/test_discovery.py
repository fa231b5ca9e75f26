"""Decode servers that are asked for their ranks, and are not up yet when the proxy starts."""

import asyncio
import random

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.settings import DpMode
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.settings.configure import make_config

COMPLETIONS = "/v1/completions"


def proxy_before(site: Site, decode: list[str]) -> Proxy:
    flags = {
        "host": "127.0.0.1",
        "port": 0,
        "admin": True,
        "admin_port": 0,
        "log": "none",
        "model": [],
        "connector": "nixl",
        "prefill": site.fleet.prefill_urls,
        "decode": decode,
    }
    environment = Environment(
        log=site.world,
        rng=random.Random(3),
        unix_s=site.loop.time,
        stopwatch=site.loop.time,
        uptime_s=site.loop.time,
    )
    return Proxy(make_config(None, flags), environment)


@served(ranks=3, dp_mode=DpMode.HEADER, at_rest=False)
async def test_a_server_that_is_not_up_yet_is_awaited(site: Site) -> None:
    """Its ranks were asked for once, and without an answer the proxy did not start."""
    engine = site.fleet.engine("decode/0")
    site.fleet.kill("decode/0")
    proxy = proxy_before(site, [f"{engine.url}@discover"])
    await proxy.start()
    port = proxy.server.port

    async def status(path: str, method: str = "GET") -> int:
        body = {"prompt": "a b", "max_tokens": 3} if method == "POST" else b""
        return (await site.send(path, body, method=method, port=port).end()).status

    for _ in range(3):
        await asyncio.sleep(2.0)
        assert await status("/ready") == 503
        assert await status(COMPLETIONS, "POST") == 503
        assert await status("/metrics") == 200
    await site.fleet.restore("decode/0")
    await site.until(lambda: proxy.ready, limit_s=5.0)
    assert await status("/ready") == 200
    assert await status(COMPLETIONS, "POST") == 200
    names = [rank.name for rank in proxy.deployment.instances.ranks if rank.open]
    assert names == [f"{engine.url}@{number}" for number in range(3)]
    proxy.deployment.driver.scheduler.check()
    await proxy.drain()
    await proxy.close()


@served(at_rest=False)
async def test_a_server_that_answers_without_telling_is_an_error_at_start(site: Site) -> None:
    site.handlers[b"/metrics"] = lambda _, __, reply: reply.send(404, [], b"")
    proxy = proxy_before(site, [f"{site.fleet.engine('decode/0').url}@discover"])
    with pytest.raises(ConfigError, match="cannot discover its ranks: protocol: status 404"):
        await proxy.start()
