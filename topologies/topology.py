"""Fleet layouts as TOML files: the engines, and the settings of the proxy in front of them.

```toml
name = "rack-7"
model = "qwen3-235b"                 # or several names; optional
connector = "nixl"                   # one of CONNECTORS; optional
[[prefill]]
url = "http://10.0.0.1:8100"
bootstrap = "http://10.0.0.1:8998"   # mooncake only; optional
kv_events = "tcp://10.0.0.1:5557"    # where it publishes its KV cache events; optional
kv_replay = "tcp://10.0.0.1:5558"    # where it sends them again; optional
[[decode]]
url = "http://10.0.0.7:8200"         # one rank with a URL of its own
[[decode]]
url = "http://10.0.0.8:8300"         # one server with several data-parallel ranks
ranks = 8                            # or ranks = "discover", or rank_ids = [0, 1, 2, 3]
[proxy]                              # flags of `balanceroute serve`, with underscores
batch = 256
[engines]                            # how the engines are started: see `engines.py`; optional
[emulation]                          # for `balanceroute up`: emulated engines in place of real ones
prefillers = 2
```

Several deployments behind one address are `[[model]]` tables in place of the engines, see `groups.py`.

With `[engines]` the engines' addresses follow from it; `[[prefill]]` and `[[decode]]` may be present
only with the same addresses. `batch` and `lease_s` of `[proxy]` follow from it too, if absent. The keys
of `[proxy]` and `[emulation]` are checked by their own readers.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from balanceroute.topologies.connector_facts import CONNECTORS, KvFlow
from balanceroute.topologies.tables import (
    MAX_PORT,
    MAX_RANKS,
    Table,
    TopologyError,
    did_you_mean,
    is_integer,
)

if TYPE_CHECKING:
    from balanceroute.topologies.engines import Engines

# The engines that a topology names by their addresses: `[[prefill]]` and `[[decode]]`.

PREFILL_KEYS = ("bootstrap", "kv_events", "kv_replay")
DECODE_KEYS = ("url", "ranks", "rank_ids")


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefiller: its URL, and its other addresses in the file."""

    url: str
    bootstrap: str | None = None  # The URL of its Mooncake bootstrap server.
    kv_events: str | None = None  # Where it publishes its KV cache events.
    kv_replay: str | None = None  # Where it sends them again.


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    url: str
    # The data-parallel ranks that it hosts; None if it is one rank with its own URL.
    rank_ids: tuple[int, ...] | None = None
    discover: bool = False  # Whether the proxy asks the server for its ranks.


def prefill_entries(table: Table) -> tuple[PrefillEntry, ...]:
    """Return the prefillers of a table. Raises TopologyError."""
    return tuple(
        PrefillEntry(entry.required_text("url"), *map(entry.text, PREFILL_KEYS))
        for entry in table.tables("prefill", ("url", *PREFILL_KEYS))
    )


def decode_entries(table: Table) -> tuple[DecodeEntry, ...]:
    """Return the decode servers of a table. Raises TopologyError."""
    entries, ranks = [], 0
    for entry in table.tables("decode", DECODE_KEYS):
        entries.append(_decode_entry(entry))
        ranks += len(entries[-1].rank_ids or (0,))
        if ranks > MAX_RANKS:
            raise entry.error("ranks", f"all decode servers may have {MAX_RANKS}, and have more")
    return tuple(entries)


def _decode_entry(entry: Table) -> DecodeEntry:
    url = entry.required_text("url")
    ranks = entry.get("ranks")
    ids = entry.get("rank_ids")
    if ids is not None:
        if ranks is not None:
            raise entry.error("rank_ids", "excludes ranks")
        if (
            not isinstance(ids, list)
            or not ids
            or not all(is_integer(i, 0, MAX_RANKS - 1) for i in ids)
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
        case int() if is_integer(ranks, 1, MAX_RANKS):
            return DecodeEntry(url, tuple(range(ranks)))
        case _:
            reason = f"must be an integer from 1 to {MAX_RANKS} or 'discover', is {ranks!r}"
            raise entry.error("ranks", reason)


# Several deployments behind one address: the `[[model]]` tables of a topology file.
#
# ```toml
# [[model]]
# name = "large"                      # the group's, and that of its model without `model`
# model = ["large", "large-sql"]      # served names, adapters too; optional
# connector = "nixl"                  # optional
# [[model.prefill]]
# url = "http://10.0.0.1:8100"
# [[model.decode]]
# url = "http://10.0.0.2:8200"
# [model.proxy]                       # settings of this group; [proxy] has those of all
# batch = 64
# ```

GROUP_KEYS = ("name", "model", "connector", "prefill", "decode", "proxy")

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")

MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One `[[model]]` table."""

    place: str  # Its name in messages, as in `model[1]`.
    name: str  # The group's.
    # Its served names; empty for its name and those that its engines serve.
    models: tuple[str, ...]
    connector: str | None  # One of `CONNECTORS`; None if the table has none.
    prefill: tuple[PrefillEntry, ...]
    decode: tuple[DecodeEntry, ...]
    proxy: Mapping[str, object]  # Its settings.

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are known to be its own before an engine was asked."""
        return self.models or (self.name,)


def has_groups(table: Table) -> bool:
    """Return whether `model` of a file is tables, and not the name of a model."""
    value = table.get("model")
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)


def read_groups(table: Table) -> tuple[GroupEntry, ...]:
    """Return the groups of a file.

    Raises:
        TopologyError: One of them is wrong, or two have one name.
    """
    tables = table.tables("model", GROUP_KEYS)
    if len(tables) > MAX_GROUPS:
        raise table.error("model", f"has {len(tables)} tables, may have {MAX_GROUPS}")
    groups = tuple(_read(f"model[{place}]", one) for place, one in enumerate(tables))
    group_of: dict[str, str] = {}
    for one, found in zip(tables, groups, strict=True):
        if any(found.name == other.name for other in groups if other is not found):
            raise one.error("name", f"is {found.name!r}, as that of another group")
        for name in found.names:
            if name in group_of:
                key = "model" if found.models else "name"
                raise one.error(key, f"has {name!r}, which is served by {group_of[name]}")
            group_of[name] = found.place
    return groups


def added_group(path: Path, content: object) -> GroupEntry:
    """Return a group that a file has not, from what its table would have; perhaps without engines.

    Raises:
        TopologyError: It is wrong.
    """
    return _read("group", Table(path, "group", content, GROUP_KEYS), may_be_empty=True)


def _read(place: str, table: Table, *, may_be_empty: bool = False) -> GroupEntry:
    name = table.required_text("name")
    if not _MODEL_NAME.fullmatch(name):
        reason = f"may have letters, digits and . _ : / @ -, is {name!r}"
        raise table.error("name", reason)
    prefill, decode = prefill_entries(table), decode_entries(table)
    proxy = table.mapping("proxy") or MappingProxyType({})
    if "discover" not in proxy and not may_be_empty:
        for key, entries in (("prefill", prefill), ("decode", decode)):
            if not entries:
                raise table.error(key, f"is missing: write [[model.{key}]]")
    return GroupEntry(
        place=place,
        name=name,
        models=table.texts("model"),
        connector=table.word("connector", tuple(CONNECTORS)),
        prefill=prefill,
        decode=decode,
        proxy=proxy,
    )


MAX_FILE_BYTES = 1 << 20
# A comment, a document mark, or a key with a colon on the first line that has anything.
_YAML = re.compile(rb"(?:\s|#[^\n]*\n)*(?:---|[\w.\"'-]+:(?:\s|$))")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Topology:
    path: Path
    name: str
    models: tuple[str, ...]  # Served model names; empty for those that the engines serve.
    connector: str | None  # One of `CONNECTORS`; None if the file has none.
    prefill: tuple[PrefillEntry, ...]
    decode: tuple[DecodeEntry, ...]
    proxy: Mapping[str, object]  # The `[proxy]` table, and what follows from the engines.
    engines: "Engines | None"  # How to start the engines; None if the file has no such table.
    # The `[emulation]` table as it is; None if the engines are real.
    emulation: Mapping[str, object] | None
    # The `[[model]]` tables; then it has no engines of its own.
    groups: tuple[GroupEntry, ...] = ()
    # The `[alias.NAME]` tables as they are, by name.
    aliases: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    # Before the keys of its tables in messages; "model[1]." if it is a group of a file.
    place: str = ""
    # Of a group, the file's `[proxy]` table; the values of `proxy` go before it.
    shared: Mapping[str, object] = field(default_factory=dict)

    @property
    def deployments(self) -> "tuple[Topology, ...]":
        """The layout of each of its groups; itself if there are none."""
        return tuple(map(self.of, self.groups)) or (self,)

    def of(self, group: GroupEntry) -> "Topology":
        return replace(
            self,
            models=group.models,
            connector=group.connector,
            prefill=group.prefill,
            decode=group.decode,
            proxy=group.proxy,
            groups=(),
            aliases={},
            place=f"{group.place}.",
            shared=self.proxy,
        )


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
    return _topology(place, _document(place))


def read_engine_list(path: Path) -> tuple[tuple[PrefillEntry, ...], tuple[DecodeEntry, ...]]:
    """Return the prefillers and decode servers of a file that has nothing else.

    Raises:
        TopologyError: It has something else, or an entry is wrong.
        OSError: The file cannot be read.
    """
    table = Table(path, "", _document(path), ("prefill", "decode"))
    return prefill_entries(table), decode_entries(table)


def shipped_topologies() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def _document(place: Path) -> dict[str, object]:
    with place.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise TopologyError(place, "", f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = ""
        if _YAML.match(content) is not None:
            hint = " (it looks like YAML: a topology is a TOML file, and values of a Helm chart are not read)"
        raise TopologyError(place, "", f"is not TOML: {error}{hint}") from error
    except RecursionError:
        raise TopologyError(place, "", "is not TOML: nested too deeply") from None


def _locate(path: str | PathLike[str]) -> Path:
    place = Path(path)
    # A name without folder and suffix is hardly a file; but an existing file takes precedence.
    if place.name != str(path) or place.suffix == ".toml" or place.exists():
        return place
    shipped = shipped_topologies()
    if place.name not in shipped:
        reason = f"no such file, and no shipped topology{did_you_mean(place.name, shipped)}"
        raise TopologyError(place, "", reason)
    return shipped[place.name]


def _topology(path: Path, document: dict[str, object]) -> Topology:
    table = Table(path, "", document, (*GROUP_KEYS, "engines", "emulation", "alias"))
    name = table.required_text("name") if "name" in table else path.stem
    if not _NAME.fullmatch(name):
        raise table.error("name", f"may have letters, digits, '.', '_' and '-', is {name!r}")
    if has_groups(table):
        return _with_groups(path, name, table)
    if "alias" in table:
        raise table.error("alias", "chooses among [[model]] tables, and there are none")
    connector = table.word("connector", tuple(CONNECTORS))
    prefill, decode = prefill_entries(table), decode_entries(table)
    emulation = table.mapping("emulation")
    proxy = table.mapping("proxy") or MappingProxyType({})
    engines = None
    if "engines" in table:
        from balanceroute.topologies.engines import read_engines  # noqa: PLC0415

        engines = read_engines(table, connector)
        prefill, decode = _addresses(table, engines, prefill, decode)
        proxy = MappingProxyType({**_follows(engines), **proxy})
    if emulation is not None and (prefill or decode):
        instead = "[engines]" if engines is not None else "[[prefill]] and [[decode]]"
        raise table.error("emulation", f"stands in place of {instead}, not beside")
    if emulation is None and "discover" not in proxy:
        for key, entries in (("prefill", prefill), ("decode", decode)):
            if not entries:
                reason = f"is missing: write [[{key}]], [engines] or an [emulation] table"
                raise table.error(key, reason)
    return Topology(
        path=path,
        name=name,
        models=table.texts("model"),
        connector=connector,
        prefill=prefill,
        decode=decode,
        proxy=proxy,
        engines=engines,
        emulation=emulation,
    )


def _with_groups(path: Path, name: str, table: Table) -> Topology:
    for key in ("connector", "prefill", "decode", "engines", "emulation"):
        if key in table:
            raise table.error(key, "belongs into a [[model]] table where there are some")
    groups = read_groups(table)
    return Topology(
        path=path,
        name=name,
        models=(),
        connector=None,
        prefill=(),
        decode=(),
        proxy=table.mapping("proxy") or MappingProxyType({}),
        engines=None,
        emulation=None,
        groups=groups,
        aliases=table.mappings("alias"),
    )


def _addresses(
    table: Table,
    engines: "Engines",
    prefill: tuple[PrefillEntry, ...],
    decode: tuple[DecodeEntry, ...],
) -> tuple[tuple[PrefillEntry, ...], tuple[DecodeEntry, ...]]:
    """Return the engines' addresses.

    Raises:
        TopologyError: The file has other addresses, or a port is out of range.
    """
    from balanceroute.topologies.placement import bracketed, place  # noqa: PLC0415

    following: dict[str, list[PrefillEntry | DecodeEntry]] = {"prefill": [], "decode": []}
    for process in place(engines):
        role = process.role
        if process.ports.stop - 1 > MAX_PORT:
            reason = f"comes to {process.ports.stop - 1} for {process.name}, beyond {MAX_PORT}"
            raise table.error(f"engines.{role.role}.port", reason)
        if role.role == "prefill":
            bootstrap = None
            if CONNECTORS[engines.connector].flow is KvFlow.NAMED:
                bootstrap = f"http://{bracketed(process.host)}:{process.kv_port}"
            following["prefill"] += [PrefillEntry(url, bootstrap) for url in process.urls]
        else:
            ids = tuple(range(role.data_parallel)) if role.dp_mode == "internal" else None
            following["decode"] += [DecodeEntry(url, ids) for url in process.urls]
    given: dict[str, tuple[PrefillEntry | DecodeEntry, ...]]
    given = {"prefill": prefill, "decode": decode}
    for key, entries in given.items():
        if entries and set(entries) != set(following[key]):
            urls = ", ".join(entry.url for entry in following[key])
            raise table.error(key, f"is not what [engines] comes to: {urls}; leave it out")
    return (
        tuple(entry for entry in following["prefill"] if isinstance(entry, PrefillEntry)),
        tuple(entry for entry in following["decode"] if isinstance(entry, DecodeEntry)),
    )


def _follows(engines: "Engines") -> dict[str, object]:
    """Return the proxy's settings that follow from those of the engines."""
    lease = {} if engines.lease_s is None else {"lease_s": engines.lease_s}
    return {"batch": engines.decode.max_num_seqs, **lease}
