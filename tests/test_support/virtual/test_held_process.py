"""A process that stands still in virtual time: what its kernel knows meanwhile, and it does not."""

import asyncio
from contextvars import ContextVar, copy_context

from tests.support.played import in_virtual_time
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import ServerLimits

_IS_HELD: ContextVar[bool] = ContextVar("is_held", default=False)


@in_virtual_time()
async def test_a_connection_that_was_closed_in_the_meantime_is_not_used_again(
    loop: VirtualLoop,
) -> None:
    """It was, and the request had to be sent again although all was well."""
    limits = ServerLimits(keep_alive_timeout_s=1.0)
    server = Server(lambda _, reply: reply.send(200, [], b""), limits=limits)
    await server.start("127.0.0.1", 0)

    async def ask() -> list[int]:
        endpoint = Endpoint("127.0.0.1", server.port)
        loop.call_later(0.00015, loop.hold, lambda one: one.get(_IS_HELD, False), 3.0)
        # The second is sent in the turn in which the answer to the first is read.
        answers = [
            await fetch(endpoint, b"POST", b"/", [], b"", timeout_s=9.0, max_bytes=9)
            for _ in range(2)
        ]
        endpoint.close()
        return [answer.status for answer in answers]

    context = copy_context()
    context.run(_IS_HELD.set, True)
    assert await loop.create_task(ask(), context=context) == [200, 200]
    assert loop.time() > 3.0
    server.close()
    await server.drain()
    await asyncio.sleep(1.0)
