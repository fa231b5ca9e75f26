"""Scripted clients, apart from what a run does with them."""

import asyncio
from typing import Any

from tests.support.chaos.clients import Client, Visit
from tests.support.chaos.requests import COMPLETIONS, ClientRequest
from tests.support.played import in_real_time


class Dead(asyncio.Transport):
    """A transport whose socket the loop has closed, as uvloop's after an interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        del data

    def abort(self) -> None:
        self.aborted = True


@in_real_time()
async def test_a_client_leaves_a_connection_without_a_socket() -> None:
    request = ClientRequest(0, COMPLETIONS, {}, b"{}", "r-0")
    gone: list[Client] = []
    client = Client(Visit(0.0, (request,)), on_left=gone.append)
    transport = Dead()
    client.connection_made(transport)
    client.leave()
    assert transport.aborted
    assert gone == [client]
