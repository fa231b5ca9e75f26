"""Publishes the KV cache events of an emulated prefiller over ZeroMQ, and sends them again.

As vLLM's ZmqEventPublisher: a PUB socket, and a ROUTER socket that answers the number of a batch with
all from there on and an end mark. Needs the extra `kv-events`.
"""

import asyncio

import zmq
import zmq.asyncio

from balanceroute.proxy.lab.emulate.prefix_caches import KvLog

_END = b"\xff" * 8
_TOPIC = b""


class KvPublisher:
    """Serves one engine's log until it is closed.

    Raises:
        zmq.ZMQError: An address cannot be bound.
    """

    def __init__(self, log: KvLog, host: str, ports: tuple[int, int]) -> None:
        self._log = log
        self._context = zmq.asyncio.Context()
        # Publishing never waits: it drops events that no listener takes.
        self._publisher: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events, self.replay = (
            _bound(socket, host, port)
            for socket, port in zip((self._publisher, self._router), ports, strict=True)
        )
        log.listeners.append(self._publish)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def close(self) -> None:
        """End like a process that ends; a second time changes nothing."""
        if self._context.closed:
            return
        self._log.listeners.remove(self._publish)
        self._task.cancel()
        self._publisher.close(0)
        self._router.close(0)
        self._context.term()

    def _publish(self, number: int, payload: bytes) -> None:
        self._publisher.send_multipart((_TOPIC, number.to_bytes(8), payload))

    async def _serve(self) -> None:
        while True:
            client, *frames = await self._router.recv_multipart()
            if len(frames) != 2:
                continue
            start = int.from_bytes(frames[1])
            for number, payload in list(self._log.batches):
                if number >= start:
                    await self._router.send_multipart(
                        (client, b"", _TOPIC, number.to_bytes(8), payload)
                    )
            await self._router.send_multipart((client, b"", _TOPIC, _END, b""))


def _bound(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", host: str, port: int) -> str:
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, 1)
    where = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{where}:{port or '*'}")
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
