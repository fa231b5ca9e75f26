"""Fleet layouts as TOML files: which engines there are, and how the proxy before them is set.

```toml
name = "rack-7"
model = "qwen3-235b"                 # or several names; optional
connector = "nixl"                   # one of CONNECTORS; optional
[[prefill]]
url = "http://10.0.0.1:8100"
bootstrap = "http://10.0.0.1:8998"   # mooncake only; optional
[[decode]]
url = "http://10.0.0.7:8200"         # one rank with a URL of its own
[[decode]]
url = "http://10.0.0.8:8300"         # one server with several data-parallel ranks
ranks = 8                            # or ranks = "discover", or rank_ids = [0, 1, 2, 3]
[proxy]                              # flags of `balanceroute serve`, with underscores
batch = 256
[emulation]                          # for `balanceroute up`: emulated engines in place of real ones
prefillers = 2
```

This module reads the layout and leaves the two tables to those who know their keys.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType

CONNECTORS = ("nixl", "mooncake", "mooncake-ascend", "mooncake-layerwise")
MAX_RANKS = 10_000
MAX_FILE_BYTES = 1 << 20
# Known words that a message may list.
_LISTED = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class TopologyError(ValueError):
    """A topology that cannot be used.

    Attributes:
        path: The file.
        key: The key at fault, as in `decode[3].url`; "" if the fault is the file's as a whole.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path, key: str, reason: str) -> None:
        super().__init__(path, key, reason)
        self.path = path
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.path), self.key, self.reason) if part)


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefiller: its URL, and that of its Mooncake bootstrap server if the file names one."""

    url: str
    bootstrap: str | None = None


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    """One decode server.

    Attributes:
        url: Its URL.
        rank_ids: The data-parallel ranks that it hosts; None if it is one rank with its own URL.
        discover: Whether the ranks are to be asked of the server.
    """

    url: str
    rank_ids: tuple[int, ...] | None = None
    discover: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """One layout.

    Attributes:
        path: The file it was read from.
        name: Its name.
        models: Served model names; empty for whatever the engines serve.
        connector: One of `CONNECTORS`; None if the file leaves it open.
        prefill: The prefillers.
        decode: The decode servers.
        proxy: The `[proxy]` table as it is.
        emulation: The `[emulation]` table as it is; None if the engines are real.
    """

    path: Path
    name: str
    models: tuple[str, ...]
    connector: str | None
    prefill: tuple[PrefillEntry, ...]
    decode: tuple[DecodeEntry, ...]
    proxy: Mapping[str, object]
    emulation: Mapping[str, object] | None


class _Table:
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
        """Return one text or a list of texts as a tuple."""
        value = self._content.get(key, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise self.error(key, f"must be a text or a list of texts, is {value!r}")
        return tuple(texts)

    def tables(self, key: str, known: Iterable[str]) -> "list[_Table]":
        value = self._content.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be an array of tables: write [[{key}]]")
        return [_Table(self._path, f"{key}[{i}]", item, known) for i, item in enumerate(value)]

    def mapping(self, key: str) -> Mapping[str, object] | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table: write [{key}]")
        return MappingProxyType(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: what it may have meant, or what is known.

    It is empty if nothing is like the word and too much is known to list it.
    """
    known = tuple(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if len(known) <= _LISTED else ""


def read_topology(path: str | PathLike[str]) -> Topology:
    """Read a topology.

    Args:
        path: A TOML file, or the name of a shipped topology, such as `emulated-2p8d`.

    Raises:
        TopologyError: The content is not a topology, or no file and no shipped topology has the
            name.
        OSError: The file cannot be read.
    """
    place = _locate(path)
    with place.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise TopologyError(place, "", f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(place, "", f"is not TOML: {error}") from error
    except RecursionError:
        raise TopologyError(place, "", "is not TOML: nested too deeply") from None
    return _topology(place, document)


def shipped_topologies() -> dict[str, Path]:
    """Return the files of this folder by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def _locate(path: str | PathLike[str]) -> Path:
    place = Path(path)
    # A name without folder and suffix can hardly be a file; but a file of that name comes first.
    if place.name != str(path) or place.suffix == ".toml" or place.exists():
        return place
    shipped = shipped_topologies()
    if place.name not in shipped:
        reason = f"no such file, and no shipped topology{did_you_mean(place.name, shipped)}"
        raise TopologyError(place, "", reason)
    return shipped[place.name]


def _topology(path: Path, document: dict[str, object]) -> Topology:
    keys = ("name", "model", "connector", "prefill", "decode", "proxy", "emulation")
    table = _Table(path, "", document, keys)
    name = table.required_text("name")
    if not _NAME.fullmatch(name):
        raise table.error("name", f"may have letters, digits, '.', '_' and '-', is {name!r}")
    connector = table.text("connector")
    if connector is not None and connector not in CONNECTORS:
        raise table.error("connector", f"is {connector!r}{did_you_mean(connector, CONNECTORS)}")
    prefill = tuple(
        PrefillEntry(entry.required_text("url"), entry.text("bootstrap"))
        for entry in table.tables("prefill", ("url", "bootstrap"))
    )
    decode = tuple(map(_decode_entry, table.tables("decode", ("url", "ranks", "rank_ids"))))
    emulation = table.mapping("emulation")
    if emulation is not None and (prefill or decode):
        raise table.error("emulation", "stands in place of [[prefill]] and [[decode]], not beside")
    if emulation is None:
        for key, entries in (("prefill", prefill), ("decode", decode)):
            if not entries:
                raise table.error(key, f"is missing: write [[{key}]], or an [emulation] table")
    return Topology(
        path=path,
        name=name,
        models=table.texts("model"),
        connector=connector,
        prefill=prefill,
        decode=decode,
        proxy=table.mapping("proxy") or MappingProxyType({}),
        emulation=emulation,
    )


def _decode_entry(entry: _Table) -> DecodeEntry:
    url = entry.required_text("url")
    ranks = entry.get("ranks")
    ids = entry.get("rank_ids")
    if ids is not None:
        if ranks is not None:
            raise entry.error("rank_ids", "excludes ranks")
        if (
            not isinstance(ids, list)
            or not ids
            or not all(_is_count(i, 0, MAX_RANKS - 1) for i in ids)
        ):
            reason = f"must be a list of integers from 0 to {MAX_RANKS - 1}, is {ids!r}"
            raise entry.error("rank_ids", reason)
        if len(set(ids)) != len(ids):
            raise entry.error("rank_ids", f"names a rank twice: {ids!r}")
        return DecodeEntry(url, tuple(ids))
    match ranks:
        case None:
            return DecodeEntry(url)
        case "discover":
            return DecodeEntry(url, discover=True)
        case int() if _is_count(ranks, 1, MAX_RANKS):
            return DecodeEntry(url, tuple(range(ranks)))
        case _:
            reason = f"must be an integer from 1 to {MAX_RANKS} or 'discover', is {ranks!r}"
            raise entry.error("ranks", reason)


def _is_count(value: object, least: int, most: int) -> bool:
    # In Python, true is an int.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
