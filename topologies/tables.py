"""Tables of a topology file, read strictly: every key is known, every error names its place."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeGuard

MAX_PORT = 65_535
MAX_RANKS = 10_000
# The most known keys or values that a message lists.
_LISTED = 16
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


class TopologyError(ValueError):
    """A topology that cannot be used.

    Attributes:
        key: The key with the error, as in `decode[3].url`; "" if the file as a whole has it.
    """

    def __init__(self, path: Path, key: str, reason: str) -> None:
        super().__init__(path, key, reason)
        self.path = path
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.path), self.key, self.reason) if part)


class Table:
    """One table of the file, with its place for error messages."""

    def __init__(self, path: Path, place: str, content: object, known: Iterable[str]) -> None:
        self._path = path
        self._place = place
        if not isinstance(content, dict):
            raise TopologyError(path, place, f"must be a table, is {content!r}")
        self._content = content
        known = tuple(known)
        for key in content:
            if key not in known:
                raise self.error(key, f"unknown key{did_you_mean(key, known)}")

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def error(self, key: str, reason: str) -> TopologyError:
        place = f"{self._place}.{key}" if self._place else key
        return TopologyError(self._path, place, reason)

    def get(self, key: str) -> object:
        return self._content.get(key)

    def text(self, key: str) -> str | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be a text, is {value!r}")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._content.get(key, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise self.error(key, f"must be a text or a list of texts, is {value!r}")
        return tuple(texts)

    def word(self, key: str, words: tuple[str, ...]) -> str | None:
        value = self.text(key)
        if value is not None and value not in words:
            raise self.error(key, f"is {value!r}{did_you_mean(value, words)}")
        return value

    def hosts(self, key: str) -> tuple[str, ...]:
        """Return the names or addresses of at least one host."""
        hosts = self.texts(key)
        if not hosts:
            raise self.error(key, "is missing")
        for i, host in enumerate(hosts):
            if not _HOST.fullmatch(host):
                raise self.error(key, f"has {host!r}, which is neither a name nor an address")
            if host in hosts[:i]:
                raise self.error(key, f"names {host!r} twice")
        return hosts

    def integer(self, key: str, least: int, most: int) -> int | None:
        value = self._content.get(key)
        if value is None or is_integer(value, least, most):
            return value
        raise self.error(key, f"must be an integer from {least} to {most}, is {value!r}")

    def required_integer(self, key: str, least: int, most: int) -> int:
        value = self.integer(key, least, most)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def port(self, key: str) -> int | None:
        return self.integer(key, 1, MAX_PORT)

    def number(self, key: str, least: float, most: float) -> float | None:
        value = self._content.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, is {value!r}")
        if not least <= value <= most:
            raise self.error(key, f"must be from {least:g} to {most:g}, is {value!r}")
        return float(value)

    def switch(self, key: str) -> bool:
        """Return true or false; false if it is missing."""
        value = self._content.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return value

    def tables(self, key: str, known: Iterable[str]) -> "list[Table]":
        """Return the tables of an array, each with the same known keys."""
        value = self._content.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be an array of tables: write [[{key}]]")
        place = f"{self._place}.{key}" if self._place else key
        return [Table(self._path, f"{place}[{i}]", item, known) for i, item in enumerate(value)]

    def table(self, key: str, known: Iterable[str]) -> "Table":
        place = f"{self._place}.{key}" if self._place else key
        if key not in self._content:
            raise self.error(key, f"is missing: write [{place}]")
        return Table(self._path, place, self._content[key], known)

    def mapping(self, key: str) -> Mapping[str, object] | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            place = f"{self._place}.{key}" if self._place else key
            raise self.error(key, f"must be a table: write [{place}]")
        return MappingProxyType(value)

    def mappings(self, key: str) -> Mapping[str, Mapping[str, object]]:
        """Return a table of tables as they are; empty if it is missing."""
        found = self.mapping(key) or {}
        for name, value in found.items():
            if not isinstance(value, dict):
                raise self.error(f"{key}.{name}", f"must be a table: write [{key}.{name}]")
        return MappingProxyType(found)  # type: ignore[arg-type]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the closest known one, or all of them.

    It is empty if none is close and there are too many to list.
    """
    known = tuple(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if len(known) <= _LISTED else ""


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether a value is an integer in a range. In Python a bool is an int; here it is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level  # "error" if it cannot work, "note" if it may be intended.
    key: str  # The key in question, as in `engines.prefill.port`; "" if the reason has it.
    reason: str  # The problem.

    def __str__(self) -> str:
        return ": ".join(part for part in (self.level, self.key, self.reason) if part)
