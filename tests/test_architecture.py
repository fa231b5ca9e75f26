"""The shape of the source: who imports whom, what the core stays free of, and how long things get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "balanceroute"
ROOT = Path(__file__).parents[1]

MAY_IMPORT = {  # Longest prefix wins.
    "proxy/core": {"proxy.core"},
    "predictors": {"proxy.core", "proxy.pictures", "predictors", "traces"},
    "proxy/sim": {"proxy.core", "proxy.pictures", "proxy.sim", "predictors", "traces"},
    "proxy/wire": {"proxy.core.errors", "proxy.wire"},
    "proxy/testing/virtual": {"proxy.testing.virtual"},
    "proxy/live": {
        "proxy.core",
        "proxy.live",
        "proxy.wire",
        "predictors",
        "topologies",
        "__version__",
    },
    # The emulated engines are the simulator's fleet, behind sockets and in real time.
    "proxy/emulate": {
        "proxy.core",
        "proxy.emulate",
        "proxy.sim.decode_fleet",
        "proxy.sim.prefill_fleet",
        "proxy.wire",
        "topologies",
        "__version__",
    },
    # Replays a seed against the whole proxy, in virtual time.
    "proxy/testing/chaos": {
        "proxy.testing.chaos",
        "proxy.core",
        "proxy.emulate",
        "proxy.live",
        "proxy.testing.virtual",
        "proxy.wire",
        "predictors",
    },
    "proxy/replay": {"proxy.core.errors", "proxy.replay", "proxy.wire", "traces", "__version__"},
    "proxy/validate": {
        "proxy.core.errors",
        "proxy.pictures",
        "proxy.validate",
        "engine_patch.reader",
        "engine_patch.records",
    },
    "proxy": {"proxy", "predictors", "traces", "topologies", "__version__"},
    "engine_patch": {"engine_patch"},
    "topologies": {"topologies"},
    "traces": {"traces"},
}
MAY_IMPORT_THIRD_PARTY = {
    "proxy/core": {"numpy"},
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
TOP_LEVEL = sorted({key.split("/")[0] for key in MAY_IMPORT})
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 70
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SHIPPED = python_files(*TOP_LEVEL)
WRITTEN = python_files(*TOP_LEVEL, "scripts", "tests")


def nodes(tree: ast.AST, *, at_run_time_only: bool = False) -> Iterator[ast.AST]:
    """Walk a tree, without what stands under `if TYPE_CHECKING:` if told so."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if (
            at_run_time_only
            and isinstance(child, ast.If)
            and "TYPE_CHECKING" in ast.dump(child.test)
        ):
            for other in child.orelse:
                yield from nodes(other, at_run_time_only=True)
        else:
            yield from nodes(child, at_run_time_only=at_run_time_only)


def imports(source: str, *, at_run_time_only: bool = False) -> set[str]:
    """Return the dotted names that a file imports."""
    found: set[str] = set()
    for node in nodes(ast.parse(source), at_run_time_only=at_run_time_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rule(path: Path, rules: dict[str, set[str]]) -> set[str] | None:
    """Return the rule with the longest prefix of a path, if any."""
    keys = [key for key in rules if relative(path).startswith(f"{key}/")]
    return rules[max(keys, key=len)] if keys else None


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_imports_point_inwards(path: Path) -> None:
    allowed = rule(path, MAY_IMPORT)
    assert allowed is not None
    for name in imports(path.read_text()):
        if name.split(".")[0] == PACKAGE:
            inner = name.removeprefix(f"{PACKAGE}.")
            assert any(inner == ok or inner.startswith(f"{ok}.") for ok in allowed), (
                f"{relative(path)} imports {name}"
            )


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_third_party_imports_are_on_the_list(path: Path) -> None:
    allowed = rule(path, MAY_IMPORT_THIRD_PARTY)
    if allowed is None:
        return
    foreign = {name.split(".")[0] for name in imports(path.read_text())}
    foreign -= sys.stdlib_module_names | {PACKAGE}
    assert foreign <= allowed


@pytest.mark.parametrize("path", python_files("proxy/core"), ids=relative)
def test_core_files_import_no_clock_no_io_and_no_randomness(path: Path) -> None:
    names = {name.split(".")[0] for name in imports(path.read_text(), at_run_time_only=True)}
    assert not names & BANNED_IN_CORE


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


def test_the_import_package_is_links() -> None:
    # A copy tool that follows links leaves a stale package that every other test accepts.
    for top in TOP_LEVEL:
        link = ROOT / ".src" / PACKAGE / top
        assert link.is_symlink(), f"{link} is a copy"
        assert link.readlink() == Path("../..") / top


@pytest.mark.parametrize("path", WRITTEN, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}: {node.name}: {length} lines"


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
    assert imports(source, at_run_time_only=True) == found
