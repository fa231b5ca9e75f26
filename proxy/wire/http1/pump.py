"""Moves the ordinary events of streams outside Python, by the library that is built from `proxy/pump`.

A stream is **lent** to it with copies of both descriptors, while nothing of it is half read or unsent.
While it is away, Python code neither reads its engine nor writes to its client; code that has to reclaims
it first (`TurnTransport.reclaim`). At the first bytes that are no ordinary event the library returns it,
and Python processes these bytes as if it had read them itself.
"""

import asyncio
import ctypes
import logging
import os
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
)
from ctypes import c_void_p as pointer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.wire.http1.client_connection import Call, ClientConnection
from balanceroute.proxy.wire.http1.server_connection import Http1Reply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.proxy.wire.messages import Reply
    from balanceroute.proxy.wire.turn_writes import TurnTransport

_LOG = logging.getLogger(__name__)

_ABI = 2
_PACKAGE, _FILE = "balanceroute_native", "libbalanceroute_native.so"
# The form of a stream's events, and how the pump handles them: `br_stream` of the library.
COMPLETIONS, NAMED, GENERATE = 0, 1, 2
COUNTED, HIDE, NO_USAGE, _CHUNKED, IDS, IDS_OF_COMPLETION, TEXT, IDS_WAIT = (
    1 << n for n in range(8)
)
# Why a stream came back, by the library's numbers for it.
_CLIENT, _FAULT = 5, 9
_REASONS = {
    1: "event",  # The next one is not ordinary: most often the last.
    2: "framing",
    3: "end",
    4: "engine",
    _CLIENT: "client",
    6: "limit",
    7: "asked",  # By whoever had to write to the client, or to end the stream.
    _FAULT: "fault",
}
_PAUSED = _NEW = 1
# Words of a slot: of 4 bytes, and of 8.
_SLOT_BYTES = 64
_TOKENS, _EVENTS, _WAITING, _FLAGS, _UNCOUNTED = 0, 1, 8, 9, 14
_LAST, _GAP, _WRITTEN, _RESUMED = 1, 2, 3, 6
_BYTES_PER_EVENT = 8


class LibraryError(BalanceRouteError):
    """The library is not there, or is not one for this version."""


class _Options(Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("threads", "slots", "max_fd", "n_bounds")),
        ("bounds_ns", POINTER(c_uint64)),
    )


class _Stream(Structure):
    _fields_ = (
        *(("engine", c_int32), ("client", c_int32)),
        *((name, c_uint32) for name in ("kind", "flags", "tokens", "high", "low", "reserved")),
        *(("last_ns", c_uint64), ("gap_max_ns", c_uint64)),
    )


class _Bytes(Structure):
    _fields_ = (("data", pointer), ("size", c_size_t))

    def copied(self) -> bytes:
        copy: bytes = ctypes.string_at(self.data, self.size) if self.size else b""
        return copy


class _Returned(Structure):
    _fields_ = (
        *(("slot", c_uint32), ("reason", c_uint32), ("error", c_int32), ("flags", c_uint32)),
        *((name, _Bytes) for name in ("engine", "client", "ids", "new_ids", "behind")),
        *((name, _Bytes) for name in ("texts", "last")),
    )


class EventForm(NamedTuple):
    """The form of a stream's ordinary events, in the library's terms."""

    kind: int  # `COMPLETIONS`, `NAMED` or `GENERATE`.
    # Of `COUNTED` (the engine's counts are read), `HIDE` (and cut out), `NO_USAGE` (an event with
    # usage is not ordinary), `TEXT` (what a `Transcript` keeps is kept) and `IDS` (what a
    # `TokenIds` keeps is kept, and cut out; `IDS_OF_COMPLETION` and `IDS_WAIT` say where it
    # stands).
    flags: int
    tokens: int  # Those so far.


class Passed(NamedTuple):
    """The events that passed while a stream was away."""

    events: int  # Their number.
    tokens: int  # Those of the stream so far, its earlier ones included.
    uncounted: int  # Events without the engine's count, where the form has counts.
    texts: bytes = b""  # The texts of the events, in the library's form.
    last: bytes = b""  # The last of the events that has any; empty for none.
    ids: bytes = b""  # Those that count, each with a comma before it.
    # Of the events with ids behind the last that counts; None for no such events.
    new_ids: bytes | None = None
    behind: bytes = b""  # Those of them that have text.


class LentStream(Protocol):
    """The reader that goes on with a stream."""

    last_s: float  # When its last events came, by the loop's clock.
    gap_max_s: float  # The longest gap between two arrivals of events.
    resumed_s: float  # When the client's last pause ended while it was away.

    def came_back(self, passed: Passed) -> None:
        """Go on: the library has returned the stream."""


class Lent:
    __slots__ = (
        "_pump",
        "_seen_ns",
        "_written",
        "carrier",
        "connection",
        "reply",
        "slot",
        "stream",
    )

    def __init__(
        self,
        pump: "Pump",
        connection: ClientConnection,
        reply: Http1Reply,
        carrier: "TurnTransport",
        stream: LentStream,
    ) -> None:
        self._pump = pump
        self._seen_ns = 0
        self._written = reply.written
        self.connection = connection
        self.reply = reply
        self.carrier = carrier
        self.stream = stream
        self.slot = -1  # Its number at the pump, which another one has later.

    @property
    def tokens(self) -> int:
        """The stream's tokens so far."""
        return self._pump.words[16 * self.slot + _TOKENS]

    @property
    def waiting(self) -> int:
        """Bytes that the client's socket has not taken; see `Borrower`."""
        self.catch_up()
        return self._pump.words[16 * self.slot + _WAITING]

    def catch_up(self) -> None:
        """Note how far the stream is, as if its events had passed here."""
        longs, at = self._pump.longs, 8 * self.slot
        last_ns = longs[at + _LAST]
        if last_ns != self._seen_ns:
            self._seen_ns = last_ns
            stream = self.stream
            stream.last_s = last_ns * 1e-9
            stream.gap_max_s = longs[at + _GAP] * 1e-9
            stream.resumed_s = longs[at + _RESUMED] * 1e-9
            self.reply.written = self._written + longs[at + _WRITTEN]

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return bool(self._pump.words[16 * self.slot + _FLAGS] & _PAUSED)

    def stop(self) -> None:
        """Get it back at once; see `Borrower`."""
        self._pump.stop(self)


class Pump:
    """The library at work: threads that move the events of lent streams.

    Args:
        slots: Streams that may be away at the same time, each of which has two descriptors more.
        high: Bytes that may wait for a client before its engine is not read any more.
        bounds_s: Upper ends of the buckets in which gaps between events are counted.

    Attributes:
        streams: How often a stream was lent.
        bodies: Bodies of requests that the library has read.
        words: The slots by 4 bytes; `longs` by 8.
        longs: The slots by 8 bytes.

    Raises:
        LibraryError: There are no descriptors or no threads for it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        threads: int,
        slots: int,
        high: int,
        bounds_s: Sequence[float],
    ) -> None:
        self.library = library  # The library.
        self._high = high
        self._lent: dict[int, Lent] = {}
        self._returned = _Returned()
        self._loop = asyncio.get_running_loop()
        bounds = (c_uint64 * len(bounds_s))(*(round(one * 1e9) for one in bounds_s))
        made = pointer()
        options = _Options(threads, slots, 0, len(bounds), bounds)
        error = library.br_pump_new(byref(options), byref(made))
        if error:
            raise LibraryError(f"the native library cannot start: {os.strerror(-error)}")
        self._made = made
        view = _view(library.br_pump_slots(made), slots * _SLOT_BYTES)
        self.words, self.longs = view.cast("I"), view.cast("Q")
        by_slot = np.frombuffer(view, np.uint32).reshape(slots, -1)
        # uint32[slots], those of each stream that is away.
        self.tokens: NDArray[np.uint32] = by_slot[:, _TOKENS]
        self._events_of: NDArray[np.uint32] = by_slot[:, _EVENTS]
        size = 8 * threads * (len(bounds) + 2)
        counted = np.frombuffer(_view(library.br_pump_gaps(made), size), np.uint64)
        self._gaps: NDArray[np.uint64] = counted.reshape(threads, -1)
        self._reported = self._gaps.sum(0)
        self.streams = self.bodies = self._events = 0
        self.returns = dict.fromkeys(_REASONS.values(), 0)  # How often one came back, by reason.
        self._has_failed = False
        self._number = library.br_pump_fd(made)
        self._loop.add_reader(self._number, self._on_returned)

    @property
    def away(self) -> int:
        return len(self._lent)

    @property
    def events(self) -> int:
        """Events that were moved so far."""
        return self._events + int(self._events_of[list(self._lent)].sum())

    def new_gaps(self) -> tuple[list[int], float]:
        """Return the gaps between events since the last call: by bucket, and their sum in seconds."""
        counted = self._gaps.sum(0)
        new = (counted - self._reported).tolist()
        self._reported = counted
        return new[:-1], new[-1] / 1e9

    def lend(self, call: Call, reply: "Reply", stream: LentStream, form: EventForm) -> Lent | None:
        """Have the library move further events; None if that is impossible now.

        Call it only within the stream's own `on_line`.
        """
        connection = call.connection
        carrier = reply.carrier if isinstance(reply, Http1Reply) else None
        if connection is None or carrier is None:
            return None
        assert isinstance(reply, Http1Reply)
        lent = Lent(self, connection, reply, carrier, stream)
        engine, client = connection.lend(lent), -1
        if engine >= 0:
            client = carrier.lend(lent)
        if client >= 0:
            made = _Stream(
                *(engine, client, form.kind, form.flags | _CHUNKED, form.tokens),
                *(self._high, self._high // 4, 0),  # As an event loop has it.
                *(round(stream.last_s * 1e9), round(stream.gap_max_s * 1e9)),
            )
            lent.slot = self.library.br_add(self._made, byref(made))
            if lent.slot >= 0:
                self.streams += 1
                self._lent[lent.slot] = lent
                return lent
            carrier.returned(b"")
        if engine >= 0:
            connection.returned()
            connection.go_on(b"")
        return None

    def stop(self, lent: Lent) -> None:
        """Reclaim a stream. The bytes that the library read are processed after the present callback."""
        error = self.library.br_stop(self._made, lent.slot, byref(self._returned))
        if error:  # It is unknown how much its client has.
            reason = os.strerror(-error)
            _LOG.error("the native library does not give a stream back, which is cut: %s", reason)
            self._returned = _Returned(lent.slot, _FAULT, error)
        connection, left = lent.connection, self._bring_back(lent)
        if connection.in_use:
            # Before anything is read.
            self._loop.call_soon(connection.go_on, left)

    def close(self) -> None:
        """Get all streams back, and end the threads."""
        self._loop.remove_reader(self._number)
        for lent in list(self._lent.values()):
            self.stop(lent)
        self.words.release()
        self.longs.release()
        self._gaps = self._gaps.copy()  # For later calls of `new_gaps`.
        self.library.br_pump_free(self._made)

    def _on_returned(self) -> None:
        os.read(self._number, _BYTES_PER_EVENT)
        self._take()

    def _take(self) -> None:
        returned = self._returned
        try:
            while not self.library.br_take(self._made, byref(returned)):
                lent = self._lent[returned.slot]
                lent.connection.go_on(self._bring_back(lent))
        except BaseException:
            self._loop.call_soon(self._take)  # Other streams must not wait for ever.
            raise

    def _bring_back(self, lent: Lent) -> bytes:
        """End the loan; return the engine's bytes that the library read and did not take."""
        slot, returned, words = lent.slot, self._returned, self.words
        lent.catch_up()
        at = 16 * slot
        passed = Passed(
            words[at + _EVENTS],
            words[at + _TOKENS],
            words[at + _UNCOUNTED],
            returned.texts.copied(),
            returned.last.copied(),
            returned.ids.copied(),
            returned.new_ids.copied() if returned.flags & _NEW else None,
            returned.behind.copied(),
        )
        left: bytes = returned.engine.copied()
        unsent: bytes = returned.client.copied()
        is_lost = returned.error != 0 and returned.reason in (_CLIENT, _FAULT)
        if returned.reason == _FAULT and not self._has_failed:
            self._has_failed = True  # Each of its streams says so.
            _LOG.error("the native pump has failed, and its streams go on without it")
        self.library.br_release(self._made, slot)
        del self._lent[slot]
        self._events += passed.events
        self.returns[_REASONS[returned.reason]] += 1
        try:
            lent.stream.came_back(passed)
        finally:  # Whatever fails: the slot is another stream's soon.
            lent.connection.returned()
            lent.carrier.returned(b"" if is_lost else unsent)
        if is_lost:  # It cannot be written to, or lacks bytes.
            lent.carrier.abort()
        return left


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def find_library() -> Path | None:
    spec = find_spec(_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((path for place in places if (path := Path(place) / _FILE).is_file()), None)


def load_library() -> ctypes.CDLL:
    """Return the library. Raises LibraryError."""
    path = find_library()
    if path is None:
        raise LibraryError("the native library is not installed (see docs/deployment.md)")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from None
    found = library.br_abi()
    if found != _ABI:
        raise LibraryError(f"{path} is of another version: {found} instead of {_ABI}")
    for name, result, *arguments in (
        ("br_pump_new", c_int, POINTER(_Options), POINTER(pointer)),
        ("br_pump_free", None, pointer),
        ("br_pump_fd", c_int, pointer),
        ("br_pump_slots", pointer, pointer),
        ("br_pump_gaps", pointer, pointer),
        ("br_add", c_int64, pointer, POINTER(_Stream)),
        ("br_stop", c_int, pointer, c_uint32, POINTER(_Returned)),
        ("br_take", c_int, pointer, POINTER(_Returned)),
        ("br_release", c_int, pointer, c_uint32),
        ("br_scan", c_int, pointer, c_char_p, c_size_t, c_size_t),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
