"""The batches of one engine's KV cache events, in order: gaps, repetitions and restarts are found.

Batches are numbered from 0 since the engine began. When a number is not the next one, the batches from
the last one that was taken on are asked for again; if that one is another now, the engine has begun
anew. Where they cannot be had, the index of that engine is emptied, and what it stores from then on
is known. So whatever comes, no more is lost than what it has cached.

Source: https://github.com/vllm-project/vllm, ZmqEventPublisher at v0.32.0.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, mixed_in

# The KV cache events of an engine as they come: msgpack, in every form that vLLM has sent.
#
# A batch is an array or a map, and so is each event in it. Fields that are not known are ignored,
# so that later versions can add some. Blocks of further cache groups and on other tiers than the
# GPU do not count, nor do those of an adapter of which the number alone is told.
#
# Source: https://github.com/vllm-project/vllm, vllm/distributed/kv_events.py at v0.32.0.

_STORED = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED = ("type", "block_hashes", "medium", "group_idx", "locality")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ("type",)}
_MASK = (1 << 64) - 1
# A block's hash is SHA-256 at most.
_HASH_BYTES = 64
_decode = msgspec.msgpack.Decoder().decode


class KvEventError(BalanceRouteError):
    """A batch is not one of KV cache events."""


def apply(payload: bytes, blocks: EngineBlocks, engine: int) -> int | None:
    """Take the events of one batch of an engine that was begun.

    Returns:
        A size of blocks that were left out because it is not `blocks.block_tokens`; None without.

    Raises:
        KvEventError: It is no batch, or an event is none; those before it have been taken.
    """
    try:
        batch = _decode(payload)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise KvEventError(f"not msgpack: {error}") from None
    if isinstance(batch, Mapping):
        events = batch.get("events")
    else:
        events = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
    if not isinstance(events, list):
        raise KvEventError("a batch without events")
    other: int | None = None
    for event in events:
        fields = _fields(event)
        kind = fields["type"]
        if kind == "AllBlocksCleared":
            blocks.cleared(engine)
        elif kind == "BlockRemoved" and _counts(fields):
            blocks.removed(engine, _hashes(fields))
        elif kind == "BlockStored" and _counts(fields):
            size = fields.get("block_size")
            if size == blocks.block_tokens:
                _store(fields, blocks, engine)
            elif isinstance(size, int):
                other = size
    return other


def _store(fields: Mapping[str, Any], blocks: EngineBlocks, engine: int) -> None:
    hashes, tokens = _hashes(fields), fields.get("token_ids")
    before = fields.get("parent_block_hash")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise KvEventError("token ids that are none")
    # With sliding windows some blocks of a prompt are left out, and which ones is not told.
    if len(tokens) == len(hashes) * blocks.block_tokens:
        try:
            extras, name = _extras(fields, len(hashes)), fields.get("session_id")
            blocks.stored(
                engine,
                hashes,
                None if before is None else _hash(before),
                tokens,
                extras=extras,
                name=name if isinstance(name, str) else "",
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise KvEventError(str(error)) from None


def _extras(fields: Mapping[str, Any], count: int) -> list[int]:
    """Return hashes of what blocks depend on beside their tokens; empty for nothing.

    Raises:
        ValueError: It is not told of each block.
        TypeError, RecursionError: See `mixed_in`.
    """
    keys, adapter = fields.get("extra_keys"), fields.get("lora_name")
    if isinstance(keys, list) and any(keys):
        if len(keys) != count:
            raise ValueError(f"extra keys of {len(keys)} blocks for {count}")
        return [mixed_in(one) for one in keys]
    return [] if adapter is None else [mixed_in([adapter])] * count


def _fields(event: object) -> Mapping[str, Any]:
    """Return an event's fields by name; at least its type."""
    if isinstance(event, Mapping) and isinstance(event.get("type"), str):
        return event
    if isinstance(event, list) and event and isinstance(event[0], str):
        return dict(zip(_FIELDS.get(event[0], ("type",)), event, strict=False))
    raise KvEventError("an event without a type")


def _counts(fields: Mapping[str, Any]) -> bool:
    """Return whether an event is of blocks in the engine's memory, and tells what they depend on."""
    return (
        fields.get("medium") in (None, "GPU")
        and fields.get("group_idx") in (None, 0)
        and fields.get("locality") in (None, "LOCAL")
        and (fields.get("lora_id") is None or fields.get("lora_name") is not None)
    )


def _hashes(fields: Mapping[str, Any]) -> list[int]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise KvEventError("an event without block hashes")
    return [_hash(one) for one in hashes]


def _hash(value: object) -> int:
    """Return 64 bits of a block's hash; 0, which no table has, is as good as none."""
    if isinstance(value, bytes) and len(value) <= _HASH_BYTES:
        return int.from_bytes(value[-8:])
    if type(value) is int:
        return value & _MASK
    raise KvEventError("a block hash that is none")


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
class KvEventSource:
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
Subscribe = Callable[["asyncio.Queue[KvEventSource]"], Coroutine[None, None, None]]


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()


# Subscribes to the KV cache events of prefillers over ZeroMQ. Needs the extra `kv-events`.
#
# Nothing that is sent takes more memory than the limits here: messages are cut off by size, and
# queues by number. What is lost by that is noticed by its number; see `KvFeed`.

_log = logging.getLogger(__name__)
_MESSAGE_BYTES = 4 << 20
# Messages that wait in a socket.
_QUEUE = 128
# Batches of one replay. vLLM keeps 10,000.
_REPLAY_BATCHES = 100_000
# Until an answer of a replay counts as missing; vLLM looks for requests ten times a second.
_REPLAY_S = 10.0
# Between two replays: the first ones, and if one is needed again and again.
_PAUSE_S, _LONG_PAUSE_S = 0.5, 60.0
_RECONNECT_MS, _LONG_RECONNECT_MS = 100, 5_000
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000
_END = b"\xff" * 8
_NUMBER_BYTES = 8
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


async def subscribe(sources: asyncio.Queue[KvEventSource]) -> None:
    """Take the events of all prefillers that come, until cancelled."""
    context = zmq.asyncio.Context()
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(_Subscriber(context, await sources.get()).run())
    finally:
        context.destroy(linger=0)


class _Subscriber:
    """Follows one source."""

    def __init__(self, context: zmq.asyncio.Context, source: KvEventSource) -> None:
        self._context = context
        self._source = source
        self._feed = source.feed
        self._clock = asyncio.get_running_loop().time
        self._pause_s = _PAUSE_S
        self._replayed_s = -_LONG_PAUSE_S
        self._other_size: int | None = None

    async def run(self) -> None:
        """Follow it as long as it is wanted."""
        subscriber = self._socket(zmq.SUB)
        monitor: Any = subscriber.get_monitor_socket(_EVENTS)
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        subscriber.subscribe(b"")
        subscriber.connect(self._source.events)
        try:
            while self._source.is_wanted():
                # Of the monitor first: what comes after a reconnection may be of another engine.
                ready = dict(await poller.poll(1_000))
                if monitor in ready:
                    await self._changed(await recv_monitor_message(monitor))
                elif subscriber in ready:
                    await self._received(await subscriber.recv_multipart())
                self._report()
                await asyncio.sleep(0)  # A receive that need not wait lets nobody else run.
        finally:
            subscriber.disable_monitor()
            monitor.close(0)
            subscriber.close(0)
        self._feed.end()

    async def _changed(self, change: Any) -> None:
        if change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            await self._catch_up()
        else:
            self._feed.interrupted()

    async def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            return  # A gap, if it was a batch.
        if self._feed.take(int.from_bytes(frames[1]), frames[2]):
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Have missing batches sent again; meanwhile others wait."""
        if self._source.replay is None:
            return
        now_s = self._clock()
        seldom = now_s - self._replayed_s > _LONG_PAUSE_S
        self._pause_s = _PAUSE_S if seldom else min(2 * self._pause_s, _LONG_PAUSE_S)
        if not seldom:
            await asyncio.sleep(max(0.0, self._replayed_s + self._pause_s - now_s))
        # An engine that has begun anew is asked for all it has.
        if not await self._replay(self._source.replay):
            await self._replay(self._source.replay)
        self._replayed_s = self._clock()

    async def _replay(self, address: str) -> bool:
        """Return whether the replay will do, or failed for good."""
        feed = self._feed
        dealer = self._socket(zmq.DEALER)
        dealer.connect(address)
        try:
            start = feed.begin_replay()
            await dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES)])
            for _ in range(_REPLAY_BATCHES):
                async with asyncio.timeout(_REPLAY_S):
                    frames = await dealer.recv_multipart()
                # A delimiter, in later versions the topic, and these two.
                number, payload = frames[-2:] if len(frames) in (3, 4) else (b"", b"")
                if len(number) != _NUMBER_BYTES:
                    break
                if number == _END:
                    return feed.end_replay(complete=True)
                if not feed.replayed(int.from_bytes(number), payload):
                    return False
                await asyncio.sleep(0)
        except TimeoutError:
            pass
        finally:
            dealer.close(0)
        return feed.end_replay(complete=False)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        for option, value in (
            (zmq.MAXMSGSIZE, _MESSAGE_BYTES),
            (zmq.RCVHWM, _QUEUE),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _LONG_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    def _report(self) -> None:
        """Tell when the index was emptied, and of blocks that do not go into it."""
        feed, url = self._feed, self._source.events
        for reason in feed.losses:
            self._source.lost(reason)
            _log.warning("KV cache events lost", extra={"fields": {"url": url, "reason": reason}})
        feed.losses.clear()
        if feed.other_size != self._other_size:
            self._other_size = feed.other_size
            fields = {"url": url, "tokens": feed.other_size}
            _log.warning("KV blocks are not of --kv-block-tokens", extra={"fields": fields})
