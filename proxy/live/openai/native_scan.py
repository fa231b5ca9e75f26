"""One large JSON object, read by the native library; Python reads one with anything unusual.

It finds the same as `JsonScanner`, in a hundredth of the time where a body has many values.
"""

import ctypes
from collections.abc import Iterable
from ctypes import Structure, byref, c_char_p, c_size_t, c_uint8, c_uint32, c_uint64

from balanceroute.proxy.live.openai.json_scan import (
    DATA_MEMBERS,
    HEADS,
    MAX_CONTAINERS,
    MAX_KEY,
    MAX_LEVELS,
    MAX_MEMBERS,
    MAX_STRINGS,
    JsonScanner,
    PromptSummary,
)

# What the library says of a call.
_MORE, _COMPLETE = 0, 1
# A byte of the worst JSON takes a few.
_BYTE_NS = 4
_MOST_LEVELS = 1_024
_MOST_PROMPTS = 4


class _Names(Structure):
    _fields_ = (("names", c_char_p), ("size", c_size_t))


class _Summary(Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("characters", "inner")),
        *((name, c_uint32) for name in ("member", "texts", "integers", "arrays", "objects")),
        *((name, c_uint32) for name in ("data_strings", "last", "n_heads")),
        ("heads", c_uint32 * (2 * HEADS)),
    )


class _Scan(Structure):
    _fields_ = (
        *(("prompts", _Names), ("data_members", _Names)),
        *((name, c_uint32) for name in ("most_containers", "most_strings", "most_levels")),
        *(
            (name, c_uint32)
            for name in ("most_key", "at", "next", "depth", "containers", "strings")
        ),
        *((name, c_uint32) for name in ("is_data", "n_members", "n_summaries", "is_prompt")),
        *(("reserved", c_uint32), ("summaries", _Summary * _MOST_PROMPTS)),
        *(("members", c_uint32 * (4 * MAX_MEMBERS)), ("stack", c_uint8 * _MOST_LEVELS)),
    )


def _names(names: Iterable[str]) -> _Names:
    text = b"".join(name.encode() + b"\0" for name in sorted(names))
    return _Names(text, len(text))


_DATA_MEMBERS = _names(DATA_MEMBERS)
_LIMITS = (MAX_CONTAINERS, MAX_STRINGS, MAX_LEVELS, MAX_KEY)


class NativeScanner:
    """Reads one object; see `JsonScanner`, which takes over with the first thing that is unusual."""

    __slots__ = ("_data", "_library", "_python", "_scan", "_summarised", "members", "summaries")

    def __init__(self, library: ctypes.CDLL, data: bytes, summarised: frozenset[str]) -> None:
        self.members: dict[str, tuple[int, int, int]] = {}
        self.summaries: dict[str, PromptSummary] = {}
        self._library = library
        self._data = data
        self._summarised = summarised
        self._scan = _Scan(_names(summarised), _DATA_MEMBERS, *_LIMITS)
        self._python: JsonScanner | None = None

    @property
    def is_native(self) -> bool:
        """Whether nothing unusual was met so far."""
        return self._python is None

    def advance(self, work_ns: int) -> bool:
        """See `JsonScanner`. Raises ScanError."""
        if self._python is None:
            said = self._library.br_scan(
                byref(self._scan), self._data, len(self._data), max(1, work_ns // _BYTE_NS)
            )
            if said == _MORE:
                return False
            if said == _COMPLETE and self._take():
                return True
            self._python = JsonScanner(self._data, self._summarised)
        is_complete = self._python.advance(work_ns)
        self.members, self.summaries = self._python.members, self._python.summaries
        return is_complete

    def _take(self) -> bool:
        """Take the members; return whether each name stands once."""
        scan, data = self._scan, self._data
        count = scan.n_members
        places = iter(scan.members[: 4 * count])
        members = {
            data[begin + 1 : name_end].decode(): (begin, value, end)
            for begin, name_end, value, end in zip(places, places, places, places, strict=True)
        }
        if len(members) != count:
            return False
        names = list(members)
        self.members = members
        self.summaries = {
            names[one.member]: _summary(one) for one in scan.summaries[: scan.n_summaries]
        }
        return True


def _summary(one: _Summary) -> PromptSummary:
    places = iter(one.heads[: 2 * one.n_heads])
    return PromptSummary(
        elements=one.texts + one.integers + one.arrays + one.objects,
        texts=one.texts,
        integers=one.integers,
        arrays=one.arrays,
        objects=one.objects,
        inner=one.inner,
        characters=one.characters,
        data_strings=one.data_strings,
        heads=list(zip(places, places, strict=True)),
        last=one.last,
    )
