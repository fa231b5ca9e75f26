"""Prints which files one streamed chat request passes through, by package, and one decision.

    scripts/walk.py

The request is the second one of a small fleet in virtual time: NIXL, BR-H, 2 prefillers, 8 ranks, 12
tokens. A profile hook notes every function that runs from the first byte of the request to the last
byte of its answer, but for what the emulated engines call, and what the proxy does of its own accord
meanwhile (probes, scrapes). Of what the client shares with the proxy (`wire`) the files count, so the
figures are upper bounds.
"""

import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.events import Tick
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate import EmulationSettings
from balanceroute.proxy.wire.http1.client import Endpoint, fetch

_PACKAGE = "/.src/balanceroute/"
_HANDLE = Scheduler.handle.__code__
_ENGINES = "proxy/lab/"
# The last one is asked by the tests' world alone.
_OWN_ACCORD = ("Proxy._task.<locals>.go_on", "Roster._settle", "Proxy.deployment")
_CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"one two three"}],"max_tokens":12,"stream":true}'


class Walk:
    """The files and functions that ran, noted while it is on."""

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()  # Calls by file, of everything.
        self.decision: Counter[str] = Counter()  # Calls by file, of one tick of the scheduler.
        self._depth = 0
        self._apart = 0  # How many of the functions that run are not of the request.

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; `sys.setprofile` calls this."""
        if event not in ("call", "return"):
            return
        _, found, name = frame.f_code.co_filename.rpartition(_PACKAGE)
        if not found:
            return
        if name.startswith(_ENGINES) or frame.f_code.co_qualname in _OWN_ACCORD:
            self._apart += 1 if event == "call" else -1
        if self._apart:
            return
        if frame.f_code is _HANDLE and isinstance(frame.f_locals["event"], Tick):
            self._depth += 1 if event == "call" else -1
        if event == "call":
            self.whole[name] += 1
            if self._depth:
                self.decision[name] += 1


async def _ask(loop: VirtualLoop, walk: Walk) -> None:
    engines = EmulationSettings(model="tiny", prefillers=2, ranks=8, max_model_len=4096)
    world = World(WorldSettings(engines, {}), loop, random.Random(7))
    await world.start()
    endpoint = Endpoint("127.0.0.1", world.port)
    headers = [(b"content-type", b"application/json")]
    try:
        for noted in (False, True):
            sys.setprofile(walk.note if noted else None)
            path = b"/v1/chat/completions"
            answer = await fetch(
                endpoint, b"POST", path, headers, _CHAT, timeout_s=60.0, max_bytes=65_536
            )
            sys.setprofile(None)
            assert answer.status == 200
    finally:
        endpoint.close()
        await world.close()


def walk_of_a_chat() -> Walk:
    """Return the walk of one streamed chat."""
    walk = Walk()
    run(lambda loop: _ask(loop, walk), seed=1, limit_s=1_000.0)
    return walk


def _table(name: str, calls: Counter[str]) -> str:
    by_package = Counter(str(Path(file).parent) for file in calls)
    rows = "\n".join(f"  {package:28} {files:3}" for package, files in by_package.most_common())
    return f"{name}: {len(calls)} files, {sum(calls.values())} calls\n{rows}"


def main() -> int:
    """Print both walks."""
    walk = walk_of_a_chat()
    print(_table("one streamed chat of 12 tokens", walk.whole))
    print(_table("of that its decision", walk.decision))
    return 0


if __name__ == "__main__":
    sys.exit(main())
