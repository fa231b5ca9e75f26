"""Prints the files that one streamed chat request passes through, those of a decision, and of a setting.

    scripts/walk.py

The request is the second one of a small fleet in virtual time: NIXL, BR-H, 2 prefillers, 8 ranks, 12
tokens. A profile hook notes every function that runs from the first byte of the request to the last
byte of its answer, but for what the emulated engines call, and what the proxy does of its own accord
meanwhile (probes, scrapes). Of what the client shares with the proxy (`wire`) the files count, so the
figures are upper bounds. So are those of the settings: files of the proxy, without the laboratory and the
command line, that have a setting's name or flag anywhere in their text. Names of one word are left out.
"""

import random
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType

from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.events import Tick
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.lab.emulate import EmulationSettings
from balanceroute.proxy.live.settings.declared import HEADINGS
from balanceroute.proxy.wire.http1.client import Endpoint, fetch

_PACKAGE = "/.src/balanceroute/"
_ENGINES = "proxy/lab/"
# Only the tests' world calls the last one.
_OWN_ACCORD = ("Proxy._task.<locals>.go_on", "Roster._settle", "Proxy.deployment")
_CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"one two three"}],"max_tokens":12,"stream":true}'


class Walk:
    """The files and functions that ran, noted while it is on."""

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()  # Calls by file, of everything.
        self.decision: Counter[str] = Counter()  # Calls by file, of one tick of the scheduler.
        # How many of the functions that run are of a decision, and are not of the request.
        self._deciding = self._apart = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; `sys.setprofile` calls this."""
        code, step = frame.f_code, {"call": 1, "return": -1}.get(event)
        _, found, name = code.co_filename.rpartition(_PACKAGE)
        if step is None or not found:
            return
        if name.startswith(_ENGINES) or code.co_qualname in _OWN_ACCORD:
            self._apart += step
        if self._apart:
            return
        if code is Scheduler.handle.__code__ and isinstance(frame.f_locals["event"], Tick):
            self._deciding += step
        if step > 0:
            self.whole[name] += 1
            self.decision[name] += bool(self._deciding)


async def _ask(loop: VirtualLoop, walk: Walk) -> None:
    engines = EmulationSettings(model="tiny", prefillers=2, ranks=8, max_model_len=4096)
    world = World(WorldSettings(engines, {}), loop, random.Random(7))
    await world.start()
    endpoint, headers = Endpoint("127.0.0.1", world.port), [(b"content-type", b"application/json")]
    asked = b"POST", b"/v1/chat/completions", headers, _CHAT
    try:
        for hook in (None, walk.note):
            sys.setprofile(hook)
            answer = await fetch(endpoint, *asked, timeout_s=60.0, max_bytes=65_536)
            sys.setprofile(None)
            assert answer.status == 200
    finally:
        endpoint.close()
        await world.close()


def walk_of_a_chat() -> Walk:
    """Return the walk of one streamed chat."""
    walk = Walk()
    run(lambda loop: _ask(loop, walk), seed=1, limit_s=1_000.0)
    walk.decision = +walk.decision
    return walk


def walks_of_settings() -> Counter[str]:
    """Return the number of files that name each setting; without names of one word, which are common."""
    root = Path(__file__).parents[1]
    folders = ("proxy/core", "proxy/wire", "proxy/live", "predictors", "topologies")
    texts = [file.read_text() for folder in folders for file in (root / folder).rglob("*.py")]
    parts = (part for parts in HEADINGS.values() for part in parts)
    names = {one.name for part in parts for one in settings_of(part) if "_" in one.name}
    patterns = {name: re.compile(rf"\b{name}\b|--{name.replace('_', '-')}\b") for name in names}
    return Counter({name: sum(map(bool, map(one.search, texts))) for name, one in patterns.items()})


if __name__ == "__main__":
    found = walk_of_a_chat()
    for name, calls in (("one chat of 12 tokens", found.whole), ("its decision", found.decision)):
        print(f"{name}: {len(calls)} files, {calls.total()} calls")
        for package, files in Counter(str(Path(file).parent) for file in calls).most_common():
            print(f"  {package:28} {files:3}")
    counts = walks_of_settings()
    few = sum(files <= 3 for files in counts.values())
    print(
        f"one of {len(counts)} settings: {median(counts.values()):g} files (the median), {few} have 3 at most"
    )
    for name, files in counts.most_common(3):
        print(f"  {name:28} {files:3}")
