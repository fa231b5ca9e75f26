"""The shape of the source: who imports whom, what the core stays free of, and how long things get."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError
from pathlib import Path

import pytest
from tests.script import ROOT, script

house = script("house")
PACKAGE = house.PACKAGE

MAY_IMPORT_THIRD_PARTY = {
    "proxy/core": {"msgspec", "numpy"},
    # In an engine's own process; there numpy is not loaded either (tests/engine_patch).
    "engine_patch": {"numpy"},
    "topologies": set[str](),
    "traces": set[str](),
}
# No sockets, no event loop, no ambient clock, no ambient randomness.
BANNED_IN_CORE = {
    "asyncio",
    "httpx",
    "random",
    "selectors",
    "socket",
    "ssl",
    "threading",
    "time",
    "uvloop",
}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_TEST_FUNCTION_LINES = 70
MAX_CLASS_LINES = 500  # Without comments.
# `scripts/walk.py` prints them.
MAX_WALK_FILES = 72
MAX_DECISION_FILES = 15
# What `serve` imports before it is asked for more.
MAX_SERVED_LINES = 43_900
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SHIPPED = house.python_files(*house.TOP_LEVEL)
WRITTEN = house.python_files(*house.TOP_LEVEL, "scripts", "tests")


def test_imports_point_inwards() -> None:
    for path in SHIPPED:
        assert not house.breaches(house.module(path), path.read_text())


def test_no_two_rooms_import_each_other() -> None:
    assert sum(len(floor) for floor in house.floors(house.arrows())) == len(house.MAY_IMPORT)


def test_the_files_that_a_request_passes_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## Life of a request")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z0-9_/]+/[a-z0-9_]+\.py)`", section))
    assert len(named) > 40
    known = {relative(path) for path in SHIPPED}
    assert {one for one in named if not {f"proxy/{one}", f"proxy/live/{one}"} & known} == set()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("proxy.core.waiting", "from balanceroute.proxy.live.proxy import Proxy"),
        # The row of the deeper room counts, and it is none of the proxy's.
        ("proxy.live.openai.body", "import balanceroute.proxy.live.engines.health"),
        ("proxy.wire.sse", "def late():\n    from balanceroute.proxy.core import events"),
        (
            "proxy.live.openai.body",
            "if TYPE_CHECKING:\n    from balanceroute.predictors import Survival",
        ),
        # What no wheel has.
        ("proxy.live.serve", "from tests.support.virtual.loop import VirtualLoop"),
        ("nowhere.module", ""),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str) -> None:
    assert house.breaches(name, source)


def test_a_cycle_of_rooms_is_found() -> None:
    with pytest.raises(CycleError):
        house.floors([*house.arrows(), ("proxy.core", "proxy.cli")])


def test_no_two_modules_import_each_other() -> None:
    assert house.cycles(house.module_imports()) == []


def test_cycles_of_modules_are_found() -> None:
    graph = {
        "a": ["b"],
        "b": ["c"],
        "c": ["b", "e"],
        "d": ["a", "e"],
        "e": ["c"],
        "f": ["g"],
        "g": "f",
    }
    assert house.cycles(graph) == [["b", "c", "e"], ["f", "g"]]
    imported = house.module_imports()
    # A name out of a module, and a module out of a package.
    assert "proxy.core.config" in imported["proxy.core.scheduler"]
    assert "proxy.lab.emulate.faults" in imported["proxy.lab.emulate.engine"]


@pytest.mark.parametrize("folder", MAY_IMPORT_THIRD_PARTY)
def test_third_party_imports_are_on_the_list(folder: str) -> None:
    for path in house.python_files(folder):
        foreign = {name.split(".")[0] for name in house.imports(path.read_text())}
        foreign -= sys.stdlib_module_names | {PACKAGE}
        assert foreign <= MAY_IMPORT_THIRD_PARTY[folder], relative(path)


def test_core_files_import_no_clock_no_io_and_no_randomness() -> None:
    for path in house.python_files("proxy/core"):
        imported = house.imports(path.read_text(), at_run_time_only=True)
        banned = {name.split(".")[0] for name in imported} & BANNED_IN_CORE
        assert not banned, relative(path)


def test_importing_the_core_loads_no_io() -> None:
    # Against what numpy loads by itself, so that only what the core adds counts; -I keeps the
    # user's environment and the current folder out.
    program = f"""
import importlib, pkgutil, sys
import numpy
before = set(sys.modules)
import {PACKAGE}.proxy.core as core
for module in pkgutil.walk_packages(core.__path__, core.__name__ + "."):
    importlib.import_module(module.name)
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert PACKAGE in loaded
    assert not loaded & BANNED_IN_CORE


def test_serving_loads_nothing_of_the_laboratory_and_little_else() -> None:
    program = f"""
import sys
import {PACKAGE}.proxy.cli.serve, {PACKAGE}.proxy.live.proxy, {PACKAGE}.proxy.live.serve
print(*(name for name in sys.modules if name.split(".")[0] == "{PACKAGE}"))
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    loaded = [name.removeprefix(f"{PACKAGE}.") for name in result.stdout.split()]
    assert "proxy.live.proxy" in loaded
    # The readers of traces, the trees, the checks of topologies and the choice of a model are for others;
    # what some fleets use is loaded with its setting.
    others = {
        "proxy.core.admission.overload",
        "proxy.core.admission.tenants",
        "proxy.core.fair_queueing",
        "proxy.core.local_prefill",
        "proxy.core.policies.baselines",
        "proxy.core.policies.within_peak",
        "proxy.core.prefill.choices",
        "proxy.core.prefill.engine_blocks",
        "proxy.core.rank_memory",
        "proxy.lab",
        "proxy.live.openai.continuation",
        "proxy.live.openai.prompt_keys",
        "proxy.live.openai.delivered",
        "proxy.live.openai.token_ids",
        "proxy.live.openai.transcript",
        "proxy.live.request.continued",
        "traces",
        "predictors.gbdt",
        "predictors.evaluation",
        "predictors.files",
        "topologies.checks",
        "topologies.topology",
        "predictors.exact_match",
        "proxy.live.control.load_log",
        "proxy.live.frontend.cors",
        "proxy.live.group_orders",
        "proxy.live.kv_events",
        "proxy.model_choice",
    }
    assert not [name for name in loaded if house.is_within(name, others)]
    files = [path for path in SHIPPED if house.module(path) in loaded]
    assert sum(map(house.lines_of, files)) <= MAX_SERVED_LINES


def test_the_import_package_is_links() -> None:
    # A copy tool that follows links leaves a stale package that every other test accepts.
    for top in house.TOP_LEVEL:
        link = ROOT / ".src" / PACKAGE / top
        assert link.is_symlink(), f"{link} is a copy"
        assert link.readlink() == Path("../..") / top


def test_files_functions_and_classes_stay_short() -> None:
    shipped = set(SHIPPED)
    for path in WRITTEN:
        lines = path.read_text().splitlines()
        assert len(lines) <= MAX_FILE_LINES, f"{relative(path)}: {len(lines)} lines"
        limit = MAX_FUNCTION_LINES if path in shipped else MAX_TEST_FUNCTION_LINES
        for node in ast.walk(house.parsed(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = lines_of(node)
                assert found <= limit, f"{relative(path)}: {node.name}: {found} lines"
            elif isinstance(node, ast.ClassDef) and path in shipped:
                check_class(node, lines, relative(path))


def check_class(node: ast.ClassDef, lines: list[str], name: str) -> None:
    body = lines[node.lineno - 1 : node.end_lineno]
    found = sum(not line.lstrip().startswith("#") for line in body)
    assert found <= MAX_CLASS_LINES, f"{name}: {node.name}: {found} lines"


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_folder_outgrows_its_budget() -> None:
    assert house.outgrown() == []


def test_no_idea_is_scattered_over_small_files() -> None:
    assert house.scattered() == []
    assert house.satellites() == []


def test_no_two_public_classes_have_the_same_name() -> None:
    assert house.doubled_names() == {}


def test_constructors_take_few_parameters() -> None:
    found = {path: house.wide_constructors(path.read_text()) for path in SHIPPED}
    assert [*filter(None, found.values())] == []
    given = ", ".join(f"p{i}" for i in range(house.MOST_PARAMETERS + 1))
    wide = f"class Wide:\n    def __init__(self, {given}): ..."
    assert house.wide_constructors(wide) == ["Wide: 9 parameters"]
    assert house.wide_constructors(wide.replace(", p8", "")) == []


def test_a_streamed_chat_passes_few_files() -> None:
    walk = script("walk").walk_of_a_chat()
    assert 20 < len(walk.whole) <= MAX_WALK_FILES
    assert 5 < len(walk.decision) <= MAX_DECISION_FILES


def test_members_of_enumerations_are_named_once() -> None:
    """CONTRIBUTING.md says why some have a name of their module, beside their enumeration."""
    trees = {path: house.parsed(path.read_text()).body for path in SHIPPED}
    defined = {
        (path, node.name): {getattr(base, "id", "") for base in node.bases}
        for path, body in trees.items()
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    enumerations = {name for (_, name), bases in defined.items() if bases & {"Enum", "IntEnum"}}
    for path, body in trees.items():
        for node in body:
            match node:
                case ast.Assign([ast.Tuple()], ast.Tuple(values)):
                    pass
                case ast.Assign([ast.Name()], value):
                    values = [value]  # A tuple of members that has one name is no alias.
                case _:
                    values = []
            for value in values:
                if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                    foreign = value.value.id in enumerations - {
                        name for at, name in defined if at == path
                    }
                    assert not foreign, f"{relative(path)}: {ast.unparse(node)}"


def test_no_file_has_a_vague_name() -> None:
    vague = [relative(path) for path in WRITTEN if VAGUE_NAMES & set(path.stem.split("_"))]
    assert not vague


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", {"time"}),
        ("from time import monotonic", {"time.monotonic"}),
        ("def later():\n    import random", {"random"}),
        ("if TYPE_CHECKING:\n    import random\nelse:\n    import time", {"time"}),
        ("if typing.TYPE_CHECKING:\n    from random import Random", set[str]()),
    ],
)
def test_the_import_finder_sees_what_runs(source: str, found: set[str]) -> None:
    assert house.imports(source, at_run_time_only=True) == found
