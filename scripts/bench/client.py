"""The load for benchmarks of proxies: raw connections, and every event checked.

Prints one JSON object: what was received, what was wrong, and how long it took.
"""

import argparse
import asyncio
import json
import random
import re
import time
from typing import Any, cast

import uvloop

_CONTENT = re.compile(rb'"content":"(\d+)\.(\d+)"')


class Load:
    """What all connections share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.left = arguments.requests
        self.stream = arguments.tokens > 0
        self._tokens: int = arguments.tokens
        self._mixed = random.Random(0) if arguments.mixed else None
        self._prompt = "t" * arguments.prompt_bytes
        self._requests: dict[int, bytes] = {}
        self.running = 0
        self.events = 0
        self.errors = 0
        self.transit_ns: list[int] = []
        self.gap_ns: list[int] = []
        self.first_ns: list[int] = []
        self.done = asyncio.get_running_loop().create_future()

    def next(self) -> int | None:
        """Take one request, if any is left; return its tokens."""
        if self.left == 0:
            return None
        self.left -= 1
        self.running += 1
        if self._mixed is None:
            return self._tokens
        return self._mixed.randrange(1, 2 * self._tokens)

    def request(self, tokens: int) -> bytes:
        if tokens not in self._requests:
            body = {"model": "bench", "prompt": self._prompt, "max_tokens": max(1, tokens)}
            if self.stream:
                body["stream"] = True
            payload = json.dumps(body).encode()
            self._requests[tokens] = (
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
            )
        return self._requests[tokens]

    def ended(self, *, well: bool) -> None:
        """Count one request that is over."""
        self.running -= 1
        self.errors += not well
        if self.running == 0 and self.left == 0 and not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._tail = b""
        self._left = 0  # Of a body with a length.
        self._tokens = 0
        self._seen = 0
        self._sent_ns = 0
        self._last_ns = 0  # When the last event came.
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio transports by duck typing alone.
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._busy:
            self._busy = False
            self._load.ended(well=False)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if self._left == 0 and self._seen == 0 and self._head is not None:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._open(head)
        if self._load.stream:
            self._take_events(data, now_ns)
        else:
            self._left -= len(data)
            if self._left == 0:
                self._end(now_ns)

    def _open(self, head: bytes) -> None:
        self._head = None  # type: ignore[assignment]
        lower = head.lower()
        if not head.startswith(b"HTTP/1.1 200"):
            self._load.errors += 1
        if not self._load.stream:
            begin = lower.index(b"content-length:") + 15
            self._left = int(lower[begin:].split(b"\r\n", 1)[0])

    def _take_events(self, data: bytes, now_ns: int) -> None:
        if self._tail:
            data = self._tail + data
        place = 0
        for match in _CONTENT.finditer(data):
            number, sent_ns = int(match[1]), int(match[2])
            if number != self._seen:
                self._load.errors += 1
            if self._seen == 0:
                self._load.first_ns.append(now_ns - self._sent_ns)
            else:
                self._load.gap_ns.append(now_ns - self._last_ns)
            self._last_ns = now_ns
            self._seen += 1
            self._load.events += 1
            self._load.transit_ns.append(now_ns - sent_ns)
            place = match.end()
        self._tail = data[max(place, len(data) - 256) :]
        if self._tail.endswith(b"0\r\n\r\n"):
            if self._seen != self._tokens or b"[DONE]" not in self._tail:
                self._load.errors += 1
            self._end(now_ns)

    def _end(self, now_ns: int) -> None:
        if not self._load.stream:
            self._load.first_ns.append(now_ns - self._sent_ns)
        self._busy = False
        self._load.ended(well=True)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        tokens = self._load.next()
        if tokens is None:
            self._transport.close()
            return
        self._busy, self._tokens = True, tokens
        self._head, self._tail, self._left, self._seen = b"", b"", 0, 0
        self._sent_ns = time.monotonic_ns()
        self._transport.write(self._load.request(tokens))


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    load = Load(arguments)
    begin = time.monotonic()
    failed = 0

    async def connect(number: int) -> None:
        nonlocal failed
        port = arguments.port[number % len(arguments.port)]
        try:
            await loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
        except OSError:
            failed += 1

    await asyncio.gather(*map(connect, range(arguments.connections)))
    if failed == arguments.connections:
        load.done.set_result(None)
    await load.done
    return {
        "seconds": time.monotonic() - begin,
        "events": load.events,
        "requests": arguments.requests - load.left,
        "errors": load.errors + failed,
        "first_us": _percentiles(load.first_ns),
        "transit_us": _percentiles(load.transit_ns),
        "gap_us": _percentiles(load.gap_ns),
    }


def _percentiles(samples_ns: list[int]) -> dict[str, float]:
    ordered = sorted(samples_ns) or [0]
    return {
        name: ordered[min(len(ordered) - 1, round(share * len(ordered)))] / 1e3
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def main() -> None:
    """Run the load of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--port", type=int, nargs="+", required=True, help="of several each has its connections"
    )
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="0: one token, not streamed")
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="lengths between 1 and twice --tokens, as many on average",
    )
    parser.add_argument("--prompt-bytes", type=int, default=64)
    print(json.dumps(uvloop.run(_run(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
