"""Requests one after the other, each by a client of its own that waits for the whole answer."""

import asyncio
from collections.abc import Sequence

from balanceroute.proxy.testing.chaos.clients import Client, Visit
from balanceroute.proxy.testing.chaos.requests import ClientRequest
from balanceroute.proxy.testing.chaos.world import World


async def ask_all(world: World, requests: Sequence[ClientRequest], *, gap_s: float) -> list[Client]:
    """Send requests to the proxy, `gap_s` apart; return the clients when all have their answers."""

    async def ask(request: ClientRequest) -> Client:
        await asyncio.sleep(request.number * gap_s)
        client = Client(Visit(0.0, (request,)), on_left=lambda _: None)
        await world.loop.create_connection(lambda: client, "127.0.0.1", world.port)
        await client.over.wait()
        return client

    return await asyncio.gather(*map(ask, requests))
