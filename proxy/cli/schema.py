"""`balanceroute schema`: the JSON schema of topology files, for editors that complete and check TOML."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from math import isfinite
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from balanceroute.proxy.core.setting import Setting, settings_of
from balanceroute.proxy.live.settings.aliases import AliasTable
from balanceroute.proxy.live.settings.declared import SECTIONS
from balanceroute.topologies import CONNECTORS
from balanceroute.topologies.engines import (
    DEVICES,
    DP_MODES,
    ENGINES_KEYS,
    ROLE_KEYS,
    ROLES,
    Engines,
    RoleEngines,
)
from balanceroute.topologies.topology import DECODE_KEYS, GROUP_KEYS, PREFILL_KEYS

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
_KINDS: dict[object, Schema] = {
    str: _TEXT,
    int: {"type": "integer", "minimum": 1},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    tuple: _TEXTS,
}
_FORMATS = ("topology",)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "schema",
        help="print the JSON schema of topology files",
        description=f"{__doc__} Even Better TOML takes it by a first line `#:schema topology.schema.json`.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("of", choices=_FORMATS, help="what files: topology")


def run(arguments: argparse.Namespace) -> int:
    del arguments
    sys.stdout.write(json.dumps(topology_schema(), indent=1) + "\n")
    return 0


def topology_schema() -> Schema:
    """Return the schema of a topology file, by the declarations of its tables and settings."""
    # Here, so that the other commands start without the emulator.
    from balanceroute.proxy.cli.emulate import FILED  # noqa: PLC0415

    settings = _table_of(SECTIONS, leave_out_top=True)
    connector = {"enum": [*CONNECTORS]}
    members: dict[str, Schema] = {
        "name": _TEXT,
        "model": _TEXTS,
        "connector": connector,
        "prefill": _entries(("url", *PREFILL_KEYS)),
        "decode": _entries(DECODE_KEYS),
        "proxy": settings,
    }
    group = _table({key: members[key] for key in GROUP_KEYS}, required=("name",))
    whole = members | {
        "model": {"anyOf": [*_TEXTS["anyOf"], {"type": "array", "items": group}]},
        "engines": _engines(),
        "emulation": _table_of(FILED),
        "alias": {"type": "object", "additionalProperties": _table_of((AliasTable,))},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "BalanceRoute topology"}
    return head | _table(whole)


def _table(members: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    found: Schema = {"type": "object", "additionalProperties": False, "properties": members}
    return found | ({"required": [*required]} if required else {})


def _table_of(sections: Iterable[type], *, leave_out_top: bool = False) -> Schema:
    """Return the schema of a table with the settings of sections, perhaps without those at a file's top."""
    known = (one for section in sections for one in settings_of(section))
    return _table({one.name: _setting(one) for one in known if not (one.at_top and leave_out_top)})


def _setting(setting: Setting) -> Schema:
    about: Schema = {"description": setting.help}
    if setting.choices:
        return about | {"enum": [*setting.choices]}
    if setting.many:
        return about | _TEXTS
    found: Schema = {"type": setting.kind}
    if setting.bounds is not None:
        for name, bound in zip(("minimum", "maximum"), setting.bounds, strict=True):
            if isfinite(bound):
                found[name] = bound
    if setting.kind == "array":  # Numbers, or one text with commas.
        found = {"anyOf": [{"type": "array", "items": {"type": "number"}}, _TEXT]}
    if setting.words:
        found = {"anyOf": [found, {"enum": [*setting.words]}]}
    return about | found


def _entries(keys: Iterable[str]) -> Schema:
    ranks = {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["discover"]}]}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    named: dict[str, Schema] = {"ranks": ranks, "rank_ids": ids}
    entry = _table({key: named.get(key, _TEXT) for key in keys}, required=("url",))
    return {"type": "array", "items": entry}


def _engines() -> Schema:
    role = _members(RoleEngines, ROLE_KEYS) | {"dp_mode": {"enum": [*DP_MODES]}}
    whole = _members(Engines, ENGINES_KEYS) | {"device": {"enum": [*DEVICES]}}
    decode = role | {"recompute_scheduler": {"type": "boolean"}}
    tables = dict(zip(ROLES, (_table(role), _table(decode)), strict=True))
    return _table(whole | tables, required=("device", "proxy_host", "weights", *ROLES))


def _members(record: type, keys: Iterable[str]) -> dict[str, Schema]:
    """Return the schemas of a table's keys, by the types of the record that it becomes."""
    hints = get_type_hints(record)
    names = {one.name for one in fields(record)}
    found: dict[str, Schema] = {}
    for key in keys:
        if key not in names:  # A port of one connector, or a table that is passed on.
            found[key] = _PORT if key.endswith("port") else {"type": "object"}
            continue
        hint = hints[key]
        if isinstance(hint, UnionType):  # None is what a file leaves out.
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        found[key] = _KINDS.get(get_origin(hint) or hint, {"type": "object"})
        if key.endswith("port"):
            found[key] = _PORT
    return found
