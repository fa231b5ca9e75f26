"""Two ends of a connection that exchange their datagrams by hand: no sockets, and time stands still."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import QuicEvent
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.wire.quic.connection import OrderedConnection

CLIENT, SERVER = ("1.2.3.4", 1234), ("2.3.4.5", 443)


@dataclass
class Pair:
    """A client and a server whose handshake is over."""

    client: QuicConnection
    server: OrderedConnection
    now_s: float = 0.0

    def to_server(self) -> list[bytes]:
        """Deliver what the client has to send; return it."""
        return self._deliver(self.client, self.server, CLIENT)

    def to_client(self) -> list[bytes]:
        return self._deliver(self.server, self.client, SERVER)

    def _deliver(self, one: QuicConnection, other: QuicConnection, address: Any) -> list[bytes]:
        self.now_s += 0.1  # No acknowledgement is delayed.
        sent = [data for data, _ in one.datagrams_to_send(now=self.now_s)]
        for data in sent:
            other.receive_datagram(data, address, now=self.now_s)
        return sent

    def exchange(self) -> None:
        """Deliver until both are silent."""
        while self.to_server() + self.to_client():
            pass

    def events(self, one: QuicConnection) -> list[QuicEvent]:
        found = []
        while (event := one.next_event()) is not None:
            found.append(event)
        return found


def connected(
    folder: Path, order: str = "rr", *, window: int = 1 << 20, streams: int = 100
) -> Pair:
    """Connect a client of aioquic to a server that sends in some order."""
    path, key = folder / "cert.pem", folder / "key.pem"
    path.write_text(CERT)
    key.write_text(KEY)
    ours = QuicConfiguration(
        is_client=False, alpn_protocols=["h3"], max_data=2 * window, max_stream_data=window
    )
    ours.load_cert_chain(path, key)
    theirs = QuicConfiguration(
        is_client=True, alpn_protocols=["h3"], server_name="localhost", max_data=1 << 24
    )
    theirs.load_verify_locations(cadata=CERT.encode())
    client = QuicConnection(configuration=theirs)
    client.connect(SERVER, now=0.0)
    server = OrderedConnection(
        order=order,
        streams=streams,
        configuration=ours,
        original_destination_connection_id=client.original_destination_connection_id,
    )
    pair = Pair(client, server)
    pair.exchange()
    pair.events(client)
    pair.events(server)
    return pair
