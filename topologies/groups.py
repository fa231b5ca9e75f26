"""Several deployments behind one address: the `[[model]]` tables of a topology file.

```toml
[[model]]
name = "large"                      # the group's, and that of its model unless `model` says others
model = ["large", "large-sql"]      # served names, adapters too; optional
connector = "nixl"                  # optional
[[model.prefill]]
url = "http://10.0.0.1:8100"
[[model.decode]]
url = "http://10.0.0.2:8200"
[model.proxy]                       # settings of this group; [proxy] has those of all
batch = 64
```
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from balanceroute.topologies.connector_facts import CONNECTORS
from balanceroute.topologies.entries import (
    DecodeEntry,
    PrefillEntry,
    decode_entries,
    prefill_entries,
)
from balanceroute.topologies.tables import Table

_KEYS = ("name", "model", "connector", "prefill", "decode", "proxy")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One `[[model]]` table.

    Attributes:
        place: What to call it in messages, as in `model[1]`.
        name: The group's.
        models: Its served names; empty for its name and those that its engines serve.
        connector: One of `CONNECTORS`; None if the table has none.
        proxy: Its settings.
    """

    place: str
    name: str
    models: tuple[str, ...]
    connector: str | None
    prefill: tuple[PrefillEntry, ...]
    decode: tuple[DecodeEntry, ...]
    proxy: Mapping[str, object]

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
    tables = table.tables("model", _KEYS)
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
    return _read("group", Table(path, "group", content, _KEYS), may_be_empty=True)


def _read(place: str, table: Table, *, may_be_empty: bool = False) -> GroupEntry:
    name = table.required_text("name")
    if not _NAME.fullmatch(name):
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
