"""Listening sockets that several processes share."""

import errno
import select
import socket

import pytest

from balanceroute.proxy.live.processes.listening import listen

HOST = "127.0.0.1"


def close(sockets: list[list[socket.socket]]) -> None:
    for own in sockets:
        for one in own:
            one.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5.0)


def test_each_process_has_a_socket_at_the_same_address() -> None:
    sockets = listen(HOST, 0, copies=3)
    assert [len(own) for own in sockets] == [1, 1, 1]
    assert len({own[0].getsockname() for own in sockets}) == 1
    close(sockets)


def test_connections_are_spread_and_wait_while_a_process_is_away() -> None:
    sockets = listen(HOST, 0, copies=2)
    port = sockets[0][0].getsockname()[1]
    clients = [connected(port) for _ in range(64)]
    counts = []
    for (one,) in sockets:  # Long after they have connected.
        counts.append(0)
        while select.select([one], [], [], 0)[0]:
            one.accept()[0].close()
            counts[-1] += 1
    assert sum(counts) == 64
    # All on one side has a probability of 2 ** -63.
    assert min(counts) > 0
    for client in clients:
        client.close()
    close(sockets)


def test_a_port_on_which_another_proxy_listens_is_refused() -> None:
    sockets = listen(HOST, 0, copies=2)
    port = sockets[0][0].getsockname()[1]
    for copies in (1, 2):
        with pytest.raises(OSError, match="in use"):
            listen(HOST, port, copies=copies)
    close(sockets)
    close(listen(HOST, port, copies=2))


def test_every_address_of_a_name_has_the_same_port() -> None:
    sockets = listen("localhost", 0, copies=2)
    assert len({one.getsockname()[1] for own in sockets for one in own}) == 1
    assert len(sockets[0]) == len({one.family for one in sockets[0]})
    close(sockets)


def test_every_interface_has_a_socket_of_each_family_in_each_process() -> None:
    try:
        sockets = listen("::", 0, copies=2)
    except OSError:
        pytest.skip("no IPv6 here")
    names = [[one.getsockname()[:2] for one in own] for own in sockets]
    port = names[0][0][1]
    assert names == [[("::", port), ("0.0.0.0", port)]] * 2  # noqa: S104
    connected(port).close()
    close(sockets)


def test_without_ipv6_not_even_ipv4_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(socket.socket):
        """One without IPv6."""

        def __init__(self, family: int, *others: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *others)

    monkeypatch.setattr(socket, "socket", Kernel)
    for copies in (1, 2):
        with pytest.raises(OSError, match="not supported"):
            listen("::", 0, copies=copies)
