"""What editors and shells are told: the schema of topology files, and completion."""

import copy
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import refused
from tests.live.settings.test_samples import SAMPLES

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.schema import topology_schema
from balanceroute.topologies import TopologyError
from balanceroute.topologies.topology import read_topology, shipped_topologies

SCHEMA = topology_schema()
KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
READ = {"additionalProperties", "anyOf", "description", "enum", "items", "maximum", "minimum"}
READ |= {"properties", "required", "type", "$schema", "title"}


def faults(schema: dict[str, Any], value: object, place: str = "") -> list[str]:
    """Return where a value is not what a schema says; of the words of JSON schema it knows `READ`."""
    assert schema.keys() <= READ
    if "anyOf" in schema:
        tried = [faults(one, value, place) for one in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [place]
    kind = KINDS[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return [place]
    found: list[str] = []
    if isinstance(value, int | float):
        least, most = schema.get("minimum", value), schema.get("maximum", value)
        found += [place] * (not least <= value <= most)
    elif isinstance(value, dict):
        found += [f"{place}.{key}" for key in schema.get("required", ()) if key not in value]
        for key, one in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            if inner is False:
                found.append(f"{place}.{key}")
            elif inner:
                found += faults(inner, one, f"{place}.{key}")
    elif isinstance(value, list) and "items" in schema:
        found += [one for item in value for one in faults(schema["items"], item, f"{place}[]")]
    return found


@pytest.mark.parametrize("name", shipped_topologies())
def test_every_shipped_topology_is_of_the_schema(name: str) -> None:
    content = tomllib.loads(shipped_topologies()[name].read_text(encoding="utf-8"))
    assert faults(SCHEMA, content) == []


def test_every_setting_may_be_what_a_file_gives(tmp_path: Path) -> None:
    assert faults(SCHEMA, {"proxy": {**SAMPLES}}) == []


GROUPS = """
[[model]]
name = "a"
model = ["a", "b"]
[[model.prefill]]
url = "http://p:1"
[[model.decode]]
url = "http://d:1"
ranks = "discover"
[model.proxy]
batch = 4
[alias.c]
groups = ["a"]
chooser = "static"
tasks.code = [0.5]
"""
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    ".polcy": lambda one: one.update(polcy=1),
    ".proxy.polcy": lambda one: one["proxy"].update(polcy="br-0"),
    ".proxy.pool_limit": lambda one: one["proxy"].update(pool_limit=-1),
    ".proxy.admin": lambda one: one["proxy"].update(admin="yes"),
    ".connector": lambda one: one.update(connector="nicl"),
    ".engines.decode.port": lambda one: one["engines"]["decode"].update(port=70_000),
    ".engines.prefill.dp_mode": lambda one: one["engines"]["prefill"].update(dp_mode="outer"),
    ".engines.weights": lambda one: one["engines"].pop("weights"),
    ".engines.prefill.recompute_scheduler": lambda one: one["engines"]["prefill"].update(
        recompute_scheduler=True
    ),
}


@pytest.mark.parametrize("place", WRONG)
def test_what_a_topology_must_not_have_is_found(place: str, tmp_path: Path) -> None:
    """And refused by the program: the schema says no more than it does."""
    content = tomllib.loads(shipped_topologies()["gpu-2p1d"].read_text(encoding="utf-8"))
    wrong = copy.deepcopy(content)
    wrong.setdefault("proxy", {})
    WRONG[place](wrong)
    assert faults(SCHEMA, wrong) == [place]


def test_groups_and_aliases_are_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "groups.toml"
    path.write_text(GROUPS)
    read_topology(path)
    assert faults(SCHEMA, tomllib.loads(GROUPS)) == []
    spoilt = GROUPS.replace('name = "a"', 'nam = "a"')
    path.write_text(spoilt)
    with pytest.raises(TopologyError):
        read_topology(path)
    assert faults(SCHEMA, tomllib.loads(spoilt))


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "topology"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_completion_needs_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    said = refused(["completion", "bash"], capsys)
    assert "needs the extra completion: pip install '.[completion]'" in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("do", ["doctor"]),
        ("serve --engine-k", ["--engine-key-file"]),
        ("serve --connector mooncake-a", ["mooncake-ascend"]),
        ("topology check --onl", ["--online"]),
        ("train gb", ["gbdt"]),
    ],
)
def test_bash_completes(
    words: str, offered: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    typed = ["balanceroute", *words.split()]
    program = f"source {script}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; "
    program += 'FUNCTION=$(complete -p balanceroute | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $FUNCTION; '
    program += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(["/bin/bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered
