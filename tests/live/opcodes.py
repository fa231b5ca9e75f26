"""Opcodes that the proxy executes: what they cost does not depend on what else the machine does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from balanceroute import proxy

if TYPE_CHECKING:
    from collections import Counter

PACKAGE = str(Path(proxy.__file__).parent) + "/"
# The share that is the proxy's: the client and the engines of a test use the same wire.
PROXY = {"live": 1.0, "core": 1.0, "wire": 0.5}


@contextmanager
def counted(opcodes: "Counter[str]") -> Iterator[None]:
    """Count the opcodes that are executed in each file of the proxy meanwhile."""

    def count(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "opcode":
            opcodes[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1
        return count

    folders = tuple(f"{PACKAGE}{name}/" for name in PROXY)

    def enter(frame: FrameType, _event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(folders):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return count

    before = sys.gettrace()
    # Python 3.12 traces the opcodes of no frame, if none has asked for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def share(opcodes: "Counter[str]") -> float:
    """Return how many of them are the proxy's."""
    return sum(count * PROXY[name.partition("/")[0]] for name, count in opcodes.items())
