"""The batches of one engine's KV cache events, in order: gaps, repetitions and restarts are found.

Batches are numbered from 0 since the engine began. When a number is not the next one, the batches from
the last one that was taken on are asked for again; if that one is another now, the engine has begun
anew. Where they cannot be had, the index of that engine is emptied, and what it stores from then on
is known. So whatever comes, no more is lost than what it has cached.

Source: https://github.com/vllm-project/vllm, ZmqEventPublisher at v0.32.0.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge
from balanceroute.proxy.live.engines.kv_event_batch import KvEventError, apply

if TYPE_CHECKING:
    import asyncio

_DIGEST_BYTES = 16


class KvFeed:
    """What is known of one engine's stream. It does no IO.

    Args:
        blocks: The index.
        engine: Whose stream it is: its number in `blocks`.
        replays: Whether batches can be asked for again.

    Attributes:
        losses: Reasons for which the index was emptied since they were read.
        ended: Whether it follows no more.
        other_size: A size of its blocks that is not that of the index; None without.
    """

    def __init__(self, blocks: EngineBlocks, engine: int, *, replays: bool) -> None:
        self.losses: list[str] = []
        self.ended = False
        self.other_size: int | None = None
        self._blocks = blocks
        self._engine = engine
        self._replays = replays
        self._last: int | None = None
        self._digest = b""
        # Whether older batches may still come that a replay has brought.
        self._overlap = False
        # Whether the next batch is taken, whatever its number.
        self._any = not replays
        self._replayed_last: int | None = None
        blocks.begin(engine, Knowledge.SOME)

    def take(self, number: int, payload: bytes) -> bool:
        """Take a batch as it comes.

        Returns:
            Whether a replay is needed; the batch was then left out.
        """
        last = self._last
        if last is None:
            if number and not self._any:
                return True
            if number == 0:
                self._blocks.cleared(self._engine)
        elif number <= last:
            if self._overlap or (number == last and _digest(payload) == self._digest):
                return False
            return self._lost("repeated", number, payload)
        elif number > last + 1:
            return self._lost("gap", number, payload)
        self._overlap = self._any = False
        self._apply(number, payload)
        return False

    def interrupted(self) -> None:
        """Note that the connection was lost: any number of batches may be missing."""
        if not self._replays and self._last is not None:
            self._forget("interrupted")

    def begin_replay(self) -> int:
        """Return the number of the batch from which a replay is to be asked for."""
        self._replayed_last = None
        if self._blocks.knowledge(self._engine) is not Knowledge.ALL:
            self._last = None  # From the start, more may be known than now.
        return self._last or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """Take a batch of a replay.

        Returns:
            Whether it fits. If not, the engine has begun anew: another replay is needed.
        """
        if self._replayed_last is None:
            self._replayed_last = number
            if self._last is None:
                if number == 0:
                    self._blocks.cleared(self._engine)
            elif (number, _digest(payload)) == (self._last, self._digest):
                return True
            else:
                # Or it has sent so many since that it has dropped that one.
                self._forget("restart")
                return False
        elif number != self._replayed_last + 1:
            self._forget("gap")
            return False
        self._replayed_last = number
        self._apply(number, payload)
        return True

    def end_replay(self, *, complete: bool) -> bool:
        """Note the end of a replay, or that it failed; return whether it will do."""
        anew = complete and self._replayed_last is None and self._last is not None
        if anew or not complete:
            self._forget("restart" if anew else "no replay")
        self._any = not complete
        self._overlap = self._last is not None
        return not anew

    def end(self) -> None:
        """Know nothing of the engine any more: it is gone."""
        self.ended = True
        self._blocks.forget(self._engine)

    def _lost(self, reason: str, number: int, payload: bytes) -> bool:
        if self._replays:
            return True
        self._forget(reason)
        return self.take(number, payload)

    def _forget(self, reason: str) -> None:
        self.losses.append(reason)
        self._last = None
        self._any = not self._replays
        self._overlap = False
        self._blocks.begin(self._engine, Knowledge.SOME)

    def _apply(self, number: int, payload: bytes) -> None:
        self._last, self._digest = number, _digest(payload)
        try:
            self.other_size = apply(payload, self._blocks, self._engine) or self.other_size
        except KvEventError:
            # What it told is unknown, and it would tell no more when it is asked again.
            self.losses.append("malformed")
            self._blocks.begin(self._engine, Knowledge.SOME)


@dataclass(frozen=True, slots=True)
class Source:
    """One engine's events.

    Attributes:
        feed: Takes them.
        events: Where it publishes them, as in `tcp://10.0.0.1:5557`.
        replay: Where it sends them again; None for nowhere.
        is_wanted: Whether its events still matter.
        lost: Called with the reason when its index was emptied.
    """

    feed: KvFeed
    events: str
    replay: str | None
    is_wanted: Callable[[], bool]
    lost: Callable[[str], None]


# Takes the events of all sources that come, until it is cancelled.
Subscribe = Callable[["asyncio.Queue[Source]"], Coroutine[None, None, None]]


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()
