"""An HTTP/3 server before an application, and aioquic's own client."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.http3_client import HOST, Http3Client, http3_client
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.live.http3_listener import (
    Http3Listener,
)
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import ServerLimits

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Application


class Http3Site:
    """A server that speaks HTTP/1.1 and HTTP/3."""

    def __init__(self, server: Server, listener: Http3Listener) -> None:
        self.server = server
        self.listener = listener

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Http3Client]:
        """Connect aioquic's client."""
        async with http3_client(self.server.port, CERT, **options) as client:
            yield client


@asynccontextmanager
async def http3_site(
    application: "Application",
    folder: Path,
    *,
    settings: Http3Settings | None = None,
    limits: ServerLimits | None = None,
    **options: Any,
) -> AsyncIterator[Http3Site]:
    """Serve an application; in the end no connection may be left."""
    path = folder / "localhost.pem"
    path.write_text(CERT + KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    key = folder / "key.pem"
    key.write_text(KEY)
    server = Server(application, limits=limits, **options)
    listener = Http3Listener(settings or Http3Settings(), path, key)
    await server.start(HOST, 0, ssl=context)
    await listener.start(server.service, server.addresses)
    try:
        yield Http3Site(server, listener)
        server.stop_accepting()
        await server.drain()
    finally:
        server.close()
        await server.drain()
        listener.close()
        await asyncio.sleep(0)
