"""What the channel between a relay and the scheduler process costs: CPU of each side, by message.

    python scripts/bench_relays.py [--frames N]

One process plays the relay and sends what a request or the streams make it send; another one plays the
scheduler process, reads it and answers each frame with one `Readiness`, which paces the first. CPU
includes the kernel's. Each figure is the median of five rounds, with the smallest and the largest.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import uvloop
from rich.console import Console
from rich.table import Table

from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.channel import Channel
from balanceroute.proxy.live.processes.frames import encode, for_relay, for_scheduler
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.testing.arguments import positive

_ROUNDS = 5
# Frames on their way at a time.
_WINDOW = 4
_SHAPE = Shape(Api.CHAT, "deepseek-ai/DeepSeek-V3", True, 1, "", None, 3000, 0, 512)
_RECORD = RequestRecord(
    *("0c9ef2b0-3c3f-4d0e-9a57-3d1f0a4f8a51", "/v1/chat/completions", 10**18, 1.79e9),
    model="deepseek-ai/DeepSeek-V3",
    outcome=Outcome.OK,
    prompt_tokens=3000,
    output_tokens=300,
    prefiller="http://10.0.0.1:8000",
    rank="http://10.0.0.9:8003",
    peer="10.1.2.3:54321",
    user_agent="OpenAI/Python 2.9.0",
)
Messages = Sequence[from_relay.FromRelay]


def _request(number: int) -> Messages:
    """Return what one request makes a relay send."""
    return [
        from_relay.Arrival(number, _SHAPE, None, 0, None, "", (), _RECORD),
        from_relay.PrefillDone(number, 1, 3000, 10**18, pulls=True, emitted=0),
        from_relay.DecodeStarted(number, 2, 0),
        from_relay.SessionEnded(number, _RECORD, "finished"),
    ]


def _progress(streams: int) -> Messages:
    """Return the progress of so many streams."""
    rows = struct.pack(f"<{streams}I", *range(streams))
    return [from_relay.Progress(rows, rows)]


def _one(_: int) -> Messages:
    return [from_relay.PrefillDone(7, 1, 3000, 10**18, pulls=True, emitted=0)]


# By name: what a frame has, and how many pieces of work that is.
KINDS: dict[str, tuple[Messages, int]] = {
    "request, alone in its frame": (_request(1), 1),
    "request, 8 in a frame": ([one for n in range(8) for one in _request(n)], 8),
    "request, 64 in a frame": ([one for n in range(64) for one in _request(n)], 64),
    "event of the core, alone": (_one(1), 1),
    "progress of 64 streams, per stream": (_progress(64), 64),
    "progress of 1,024 streams, per stream": (_progress(1024), 1024),
}


async def _scheduler(end: socket.socket, per_frame: int) -> None:
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer = [to_relay.Readiness(ready=True)]
    read = 0

    def on_messages(messages: Messages) -> None:
        nonlocal read
        read += len(messages)
        while read >= per_frame:  # Frames may come together.
            read -= per_frame
            channel.write(answer)

    channel = Channel(for_scheduler(), on_messages=on_messages, on_close=closed.set_result)
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=end)
    await closed


def _run_scheduler(
    end: socket.socket, other: socket.socket, per_frame: int, pipe: Connection
) -> None:
    other.close()  # Else its end would not be seen.
    began_s = time.process_time()
    uvloop.run(_scheduler(end, per_frame))
    pipe.send(time.process_time() - began_s)


async def _relay(end: socket.socket, messages: Messages, frames: int) -> float:
    """Send frames; return the CPU seconds that it took."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    sent = answered = 0

    def on_messages(answers: Sequence[to_relay.ToRelay]) -> None:
        nonlocal sent, answered
        for _ in answers:
            answered += 1
            if sent < frames:
                sent += 1
                channel.write(messages)
        if answered == frames:
            done.set_result(None)

    closed: asyncio.Future[str] = loop.create_future()
    channel = Channel(for_relay(), on_messages=on_messages, on_close=closed.set_result)
    await loop.create_unix_connection(lambda: channel, sock=end)
    began_s = time.process_time()
    for _ in range(_WINDOW):
        sent += 1
        channel.write(messages)
    await done
    took_s = time.process_time() - began_s
    channel.close("done")
    await closed
    return took_s


def measure(messages: Messages, frames: int) -> tuple[float, float]:
    """Return the CPU seconds of the relay and of the scheduler process."""
    near, far = socket.socketpair()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_run_scheduler, args=(far, near, len(messages), theirs)
    )
    process.start()
    far.close()
    relay_s = uvloop.run(_relay(near, messages, frames))
    scheduler_s: float = ours.recv()
    process.join()
    return relay_s, scheduler_s


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=positive, default=4000, help="frames of a round")
    options = parser.parse_args(arguments)
    table = Table("what", "bytes", "relay µs", "scheduler µs")
    for name, (messages, works) in KINDS.items():
        frames = max(_WINDOW, options.frames // max(1, len(messages) // 6))
        rounds = [measure(messages, frames) for _ in range(_ROUNDS)]
        per = 1e6 / (frames * works)
        sides = [_shown([one[side] * per for one in rounds]) for side in (0, 1)]
        table.add_row(name, f"{len(encode(messages)) / works:,.0f}", *sides)
    Console().print(table)


if __name__ == "__main__":
    main()
