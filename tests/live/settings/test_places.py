"""Each setting stands in few places: where it is declared, in the part that uses it, and where that is assembled."""

import ast
from collections import defaultdict
from functools import cache

import pytest
from tests.script import script

from balanceroute.proxy.core.setting import Setting, settings_of
from balanceroute.proxy.live.settings.declared import SECTIONS

house = script("house")

DECLARED: list[tuple[type, Setting]] = [
    (section, one) for section in SECTIONS for one in settings_of(section)
]
# What serves. The laboratory's commands have settings of their own, some of the same name.
SERVING = ("proxy.core", "proxy.wire", "proxy.live", "proxy.settings", "predictors")
# Rooms that are one part.
PARTS = ("proxy.core", "proxy.wire")
# A name of one word is a word of the field (`model`, `host`, `seed`): what else has it is no copy.
COMPOUND = [(section, one) for section, one in DECLARED if "_" in one.name]

# Settings in more than three parts.
SPREAD = {
    "client_priority": "tenants have their own, which goes before it",
    "client_deadline": "tenants have their own, which goes before it",
    "pool_limit": "the limit in effect is a metric, and on the page of the state",
    "warm_up": "also the part of the core that it switches on",
}
# Names that more than one record has.
REPEATED = {
    "client_priority": "a tenant's own",
    "client_deadline": "a tenant's own",
    "queue_limit": "a tenant's own",
    "kv_events": "of one prefiller, where the setting has those of all",
    "kv_replay": "of one prefiller, where the setting has those of all",
    "rank_speeds": "one for each rank, where the setting is repeated over them",
    "rank_kv_tokens": "for a policy, of the ranks as they are",
    "pool_limit": "as it is in effect, for metrics",
    "lease_s": "as it is in effect for a connector",
    "log_level": "as an administrator set it",
    "progress_veto": "the driver's, which is told it",
    "warm_up": "the driver's, which is told it",
    "group_return_s": "the driver's, which is told it",
    "prefix_affinity": "of one policy made of these parameters",
}


@cache
def serving() -> list[tuple[str, ast.Module]]:
    """Return the modules that serve."""
    return [
        (house.module(path), ast.parse(path.read_text(encoding="utf-8")))
        for path in house.python_files(*house.TOP_LEVEL)
        if house.is_within(house.module(path), SERVING)
    ]


@cache
def parts() -> dict[str, set[str]]:
    """Return in which parts each name is passed, read or declared."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in serving():
        part = next((one for one in PARTS if house.is_within(name, [one])), house.room(name))
        assert part is not None
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                    found[word].add(part)
                case ast.AnnAssign(target=ast.Name(id=word)):
                    found[word].add(part)
                case _:
                    pass
    return found


@cache
def records() -> dict[str, set[str]]:
    """Return the classes that have a field of each name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in serving():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        found[one.target.id].add(f"{name}.{node.name}")
    return found


@pytest.mark.parametrize("setting", [one for _, one in COMPOUND], ids=lambda one: one.name)
def test_a_setting_is_in_three_parts_at_most(setting: Setting) -> None:
    where = parts()[setting.attribute] | parts()[setting.name]
    assert (len(where) > 3) == (setting.name in SPREAD), sorted(where)


@pytest.mark.parametrize(("section", "setting"), COMPOUND, ids=[one.name for _, one in COMPOUND])
def test_one_record_has_a_setting(section: type, setting: Setting) -> None:
    where = records()[setting.attribute]
    assert any(one.endswith(f".{section.__name__}") for one in where)
    assert (len(where) > 1) == (setting.name in REPEATED), sorted(where)


def test_no_two_sections_declare_a_setting() -> None:
    names = [one.name for _, one in DECLARED]
    assert sorted(names) == sorted(set(names))
    assert {*SPREAD, *REPEATED} <= set(names)
