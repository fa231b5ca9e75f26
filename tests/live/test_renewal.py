"""Keys that are read again while the proxy serves: everything that carries one uses the new one."""

import asyncio
from typing import TYPE_CHECKING

from tests.support.site import Site, play

from balanceroute.proxy.live.security import Credentials, Secret
from balanceroute.proxy.live.serve import renew

if TYPE_CHECKING:
    from pathlib import Path

    from balanceroute.proxy.wire.messages import HttpRequest, Reply


def test_probes_and_scrapes_carry_the_engines_newest_key(tmp_path: "Path") -> None:
    key = tmp_path / "key"
    key.write_text("before\n")
    key.chmod(0o600)

    async def scenario(site: Site) -> None:
        keys: dict[bytes, list[bytes | None]] = {b"/health": [], b"/metrics": []}

        def answer(_engine: str, request: "HttpRequest", reply: "Reply") -> None:
            keys[request.path].append(request.header(b"authorization"))
            reply.send(200, [], b"")

        site.handlers |= dict.fromkeys(keys, answer)
        await asyncio.sleep(10.0)
        assert all(set(given) == {b"Bearer before"} for given in keys.values())
        for given in keys.values():
            given.clear()
        renew(site.world.proxy, lambda: Credentials((), Secret(b"after"), None))
        await asyncio.sleep(10.0)
        assert all(set(given) == {b"Bearer after"} for given in keys.values())

    play(scenario, flags={"engine_key_file": str(key)})
