"""Prints which room of the house imports which and how large each is, and fails if a rule is broken.

    scripts/house.py

A room is a package, or a module, with a row in `MAY_IMPORT`. It also prints which modules of a room
import each other.
"""

import ast
import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "balanceroute"
ROOT = Path(__file__).parents[1]

# What a room may import beside itself: these and what is below them. A module belongs to the row
# with the longest name that its own begins with.
MAY_IMPORT = {
    "engine_patch": set[str](),
    "topologies": set[str](),
    "traces": {"proxy.core.errors"},
    "predictors": {"proxy.core", "traces"},
    "proxy.core": set[str](),
    "proxy.lab.pictures": {"proxy.core.errors"},
    "proxy.lab.service_levels": set[str](),
    "proxy.lab": set[str](),
    "proxy.page_client": {"proxy.core.errors", "proxy.live.security", "__version__"},
    "proxy.capacity": {"proxy.core"},
    "proxy.model_choice": {"proxy.core.errors"},
    "proxy.lab.model_choice": {"proxy.core.errors", "proxy.lab.pictures", "proxy.model_choice"},
    "proxy.wire": {"proxy.core.errors", "proxy.core.setting"},
    "proxy.wire.http1": {"proxy.core.errors", "proxy.wire"},
    "proxy.wire.streams": {"proxy.core.errors", "proxy.wire", "proxy.wire.http1"},
    "proxy.wire.http2": {
        *("proxy.core.errors", "proxy.wire", "proxy.wire.http1", "proxy.wire.streams"),
    },
    "proxy.wire.http3": {"proxy.core.errors", "proxy.wire"},
    "proxy.wire.quic": {"proxy.core.errors", "proxy.wire"},
    "proxy.live.connectors": {"proxy.core", "topologies"},
    "proxy.live.openai": {"proxy.core", "proxy.wire"},
    "proxy.live.security": {"proxy.core", "proxy.wire"},
    "proxy.live.engines": {
        *("proxy.core", "proxy.wire", "topologies", "__version__"),
        *("proxy.live.connectors", "proxy.live.openai"),
    },
    "proxy.live.telemetry": {
        *("proxy.core", "predictors", "__version__"),
        *("proxy.live.engines", "proxy.live.openai", "proxy.live.security"),
    },
    "proxy.live.prediction": {
        *("proxy.core", "predictors", "topologies"),
        "proxy.live.telemetry",
    },
    "proxy.live.request": {
        *("proxy.core", "proxy.wire"),
        *("proxy.live.connectors", "proxy.live.engines", "proxy.live.openai"),
        "proxy.live.telemetry",
    },
    "proxy.live.scheduling": {
        *("proxy.core", "proxy.wire", "predictors"),
        *("proxy.live.connectors", "proxy.live.engines", "proxy.live.openai"),
        *("proxy.live.prediction", "proxy.live.request", "proxy.live.telemetry"),
    },
    "proxy.settings": {"proxy.core", "topologies"},
    "proxy.live.settings": {
        *("proxy.core", "proxy.model_choice", "proxy.settings", "proxy.wire", "topologies"),
        *("proxy.live.engines", "proxy.live.prediction"),
        *("proxy.live.request", "proxy.live.security", "proxy.live.telemetry"),
        "__version__",
    },
    "proxy.live.tracing": {
        *("proxy.core", "proxy.wire", "__version__"),
        *("proxy.live.openai", "proxy.live.security", "proxy.live.settings.tracing"),
        "proxy.live.telemetry",
    },
    "proxy.live.frontend": {
        *("proxy.core", "proxy.model_choice", "proxy.wire", "__version__"),
        *("proxy.live.connectors", "proxy.live.engines", "proxy.live.openai"),
        *("proxy.live.request", "proxy.live.scheduling", "proxy.live.security"),
        *("proxy.live.settings", "proxy.live.telemetry"),
    },
    "proxy.live.control": {
        *("proxy.core", "proxy.wire", "topologies", "__version__"),
        *("proxy.live.engines", "proxy.live.openai", "proxy.live.request"),
        *("proxy.live.scheduling", "proxy.live.security", "proxy.live.settings"),
        "proxy.live.telemetry",
    },
    "proxy.live.discovery": {
        *("proxy.core", "proxy.wire", "topologies", "__version__"),
        *("proxy.live.control", "proxy.live.engines", "proxy.live.security"),
        "proxy.live.settings",
    },
    "proxy.live.scaling": {"proxy.capacity", "proxy.live.frontend"},
    "proxy.live.select_service": {
        *("proxy.core", "proxy.wire", "proxy.live.engines", "proxy.live.frontend"),
        *("proxy.live.request", "proxy.live.security", "proxy.live.selection"),
    },
    "proxy.live.selection": {
        *("proxy.core", "proxy.wire"),
        *("proxy.live.engines", "proxy.live.frontend", "proxy.live.openai"),
        *("proxy.live.request", "proxy.live.scheduling", "proxy.live.telemetry"),
    },
    "proxy.live.replica_choices": {"proxy.core", "proxy.live.scheduling", "predictors"},
    "proxy.live.ray_router": {"proxy.core", "proxy.live.replica_choices"},
    "proxy.live.picker": {
        *("proxy.core", "proxy.wire", "proxy.live.engines", "proxy.live.frontend"),
        *("proxy.live.openai", "proxy.live.scheduling", "proxy.live.selection"),
        "proxy.live.settings",
    },
    "proxy.live.unit_metrics": {
        *("proxy.core", "proxy.live.engines", "proxy.live.frontend"),
        *("proxy.live.scheduling", "proxy.live.telemetry"),
    },
    "proxy.live.leader": {
        *("proxy.core", "proxy.wire"),
        *("proxy.live.discovery", "proxy.live.prediction", "proxy.live.scheduling"),
    },
    "proxy.live": {"proxy.core", "proxy.live", "proxy.settings", "proxy.wire", "predictors"},
    "proxy.lab.sim": {
        *("proxy.core", "proxy.lab.pictures", "proxy.lab.service_levels"),
        *("predictors", "traces"),
    },
    # The emulated engines are the simulator's fleet, behind sockets and in real time.
    "proxy.lab.emulate": {
        *("proxy.core", "proxy.wire", "topologies", "__version__"),
        "proxy.lab.sim.engines",
    },
    "proxy.lab.replay": {
        *("proxy.core.errors", "proxy.core.setting", "proxy.lab.service_levels", "proxy.wire"),
        *("traces", "__version__"),
    },
    "proxy.lab.audit": {
        *(
            "proxy.capacity",
            "proxy.core",
            "proxy.page_client",
            "proxy.lab.pictures",
            "proxy.lab.sim",
        ),
        *("proxy.lab.validate.validation", "traces"),
    },
    "proxy.lab.advise": {
        *(
            "proxy.lab.audit",
            "proxy.capacity",
            "proxy.core",
            "proxy.page_client",
            "proxy.lab.service_levels",
        ),
        "proxy.lab.sim",
    },
    "proxy.lab.validate": {
        *("proxy.core.errors", "proxy.lab.pictures"),
        *("engine_patch.reader", "engine_patch.writer"),
    },
    "proxy.cli": {
        *(
            "proxy.capacity",
            "proxy.core",
            "proxy.lab",
            "proxy.live",
            "proxy.model_choice",
            "proxy.page_client",
        ),
        *("proxy.settings", "proxy.wire", "predictors", "topologies", "traces", "__version__"),
    },
    "proxy": {"proxy.cli", "proxy.core", "topologies", "traces", "__version__"},
}
# Lines and files that each folder may have. A change that needs more raises it here, and says why.
BUDGET = {
    "proxy/core": (13_450, 37),
    "proxy/wire": (7_550, 24),
    "proxy/live": (38_000, 124),
    "proxy/lab": (15_400, 55),
    "proxy/cli": (5_500, 25),
    "predictors": (3_750, 13),
    "topologies": (2_100, 8),
    "traces": (1_400, 5),
    "engine_patch": (650, 5),
    "scripts": (13_800, 42),
    "tests/support": (12_450, 43),
    # All of it.
    "tests": (114_400, 411),
}
# So that no idea is scattered over many small files: the mean length of a room's files, and the length
# below which a file that one other file alone uses is part of that one.
LEAST_MEAN_LINES = 180
LEAST_LINES = 60
# Parameters of a constructor. The exceptions may not grow, nor become more.
MOST_PARAMETERS = 8
WIDE = {
    "Endpoint": 13,
    "Roster": 10,
    "Decoder": 10,
    "CompletionStream": 9,
    "GroupWorld": 9,
    "Simulation": 9,
}
TOP_LEVEL = sorted({row.split(".")[0] for row in MAY_IMPORT})


def python_files(*folders: str) -> list[Path]:
    """Return the source files in folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module(path: Path) -> str:
    """Return a file's dotted name within the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a file, which several rules read."""
    gc.disable()  # None of its nodes is garbage, and looks for some would take most of the time.
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def nodes(tree: ast.AST, *, at_run_time_only: bool = False) -> Iterator[ast.AST]:
    """Walk a tree, without what stands under `if TYPE_CHECKING:` if `at_run_time_only`."""
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


@cache
def imports(source: str, *, at_run_time_only: bool = False) -> frozenset[str]:
    """Return the dotted names that a file imports."""
    found: set[str] = set()
    for node in nodes(parsed(source), at_run_time_only=at_run_time_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(source: str) -> set[str]:
    """Return what a file imports of this package, types included, without the package's name."""
    return {
        name.removeprefix(f"{PACKAGE}.")
        for name in imports(source)
        if name.split(".")[0] == PACKAGE
    }


def is_within(name: str, packages: Iterable[str]) -> bool:
    """Return whether a dotted name is one of `packages` or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@cache
def room(name: str) -> str | None:
    """Return the row of `MAY_IMPORT` that a dotted name belongs to, if any."""
    return max((row for row in MAY_IMPORT if is_within(name, [row])), key=len, default=None)


def breaches(name: str, source: str) -> list[str]:
    """Return what the module `name` imports and may not."""
    own = room(name)
    if own is None:
        return [f"{name} is in no room"]
    found = own_imports(source) | {
        other for other in imports(source) if is_within(other, ["tests"])
    }
    return [
        f"{name} imports {other}"
        for other in sorted(found)
        if room(other) != own and not is_within(other, MAY_IMPORT[own])
    ]


def arrows() -> Counter[tuple[str, str]]:
    """Return from which room to which other one imports go, and how many."""
    found: Counter[tuple[str, str]] = Counter()
    for path in python_files(*TOP_LEVEL):
        own = room(module(path))
        for name in own_imports(path.read_text()):
            other = room(name)
            if own is not None and other is not None and other != own:
                found[own, other] += 1
    return found


def floors(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the rooms by height: each imports only from floors below its own.

    Raises:
        CycleError: Rooms import each other; its second argument is the cycle.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter({row: [] for row in MAY_IMPORT})
    for importer, imported in pairs:
        sorter.add(importer, imported)
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorter.get_ready()
        found.append(sorted(ready))
        sorter.done(*ready)
    return found


def module_imports() -> dict[str, set[str]]:
    """Return what each module imports of other modules, types included."""
    sources = {module(path): path.read_text() for path in python_files(*TOP_LEVEL)}
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        # `from a import b` imports the module a.b, or something out of the module a.
        imported = {
            full if full in sources else full.rpartition(".")[0] for full in own_imports(source)
        }
        found[name] = (imported & sources.keys()) - {name}
    return found


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        ahead = list(graph[name])
        seen = reached[name] = set()
        while ahead:
            other = ahead.pop()
            if other not in seen:
                seen.add(other)
                ahead += graph.get(other, ())
    groups = {
        tuple(sorted(other for other in seen if name in reached[other]))
        for name, seen in reached.items()
        if name in seen
    }
    return sorted(list(group) for group in groups)


def lines_of(path: Path) -> int:
    """Return how many lines a file has."""
    return path.read_text(encoding="utf-8").count("\n")


def outgrown() -> list[str]:
    """Return the folders with more lines or files than `BUDGET` gives them."""
    found = []
    for folder, (lines, count) in BUDGET.items():
        files = python_files(folder)
        total = sum(map(lines_of, files))
        if total > lines or len(files) > count:
            found.append(f"{folder}: {total} lines of {lines}, {len(files)} files of {count}")
    return found


def scattered() -> list[str]:
    """Return the rooms whose files are short on average; a room of up to four may have short ones."""
    files: dict[str, list[int]] = {}
    for path in python_files(*TOP_LEVEL):
        own, length = room(module(path)), lines_of(path)
        if own is not None and (path.name != "__init__.py" or length >= LEAST_LINES):
            files.setdefault(own, []).append(length)
    return [
        f"{own}: {len(lengths)} files of {sum(lengths) // len(lengths)} lines"
        for own, lengths in sorted(files.items())
        if len(lengths) > 4 and sum(lengths) < LEAST_MEAN_LINES * len(lengths)
    ]


def satellites() -> list[str]:
    """Return the short modules that one other module alone uses."""
    importers: dict[str, list[str]] = {}
    for name, imported in module_imports().items():
        for other in imported:
            importers.setdefault(other, []).append(name)
    return [
        f"{module(path)} of {importers[module(path)][0]}"
        for path in python_files(*TOP_LEVEL)
        if path.name != "__init__.py"
        if lines_of(path) < LEAST_LINES and len(importers.get(module(path), ())) == 1
    ]


def doubled_names() -> dict[str, list[str]]:
    """Return the public classes that have the same name, and their modules."""
    found: dict[str, list[str]] = {}
    for path in python_files(*TOP_LEVEL):
        for node in parsed(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module(path))
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def wide_constructors(source: str) -> list[str]:
    """Return the classes of a file whose constructors take more than `MOST_PARAMETERS`."""
    found = []
    for node in ast.walk(parsed(source)):
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                given = part.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                assert isinstance(node, ast.ClassDef)
                if count > WIDE.get(node.name, MOST_PARAMETERS):
                    found.append(f"{node.name}: {count} parameters")
    return found


def main() -> int:
    """Print the floors from the top, and return 1 if a rule is broken."""
    sources = python_files(*TOP_LEVEL)
    broken = [line for path in sources for line in breaches(module(path), path.read_text())]
    counts = arrows()
    try:
        for height, rooms in reversed(list(enumerate(floors(counts)))):
            for name in rooms:
                below = sorted((to, n) for (of, to), n in counts.items() if of == name)
                print(f"{height} {name}: {', '.join(f'{to} {n}' for to, n in below) or '-'}")
    except CycleError as error:
        broken.append(f"cycle: {' -> '.join(error.args[1])}")
    print(f"{len(MAY_IMPORT)} rooms, {len(counts)} arrows")
    for group in cycles(module_imports()):
        print(f"import each other: {' '.join(group)}")
    for folder in BUDGET:
        files = python_files(folder)
        print(f"{folder}: {sum(map(lines_of, files))} lines, {len(files)} files")
    broken += [*outgrown(), *scattered(), *satellites()]
    broken += [wide for path in sources for wide in wide_constructors(path.read_text())]
    broken += [f"{name}: {' '.join(modules)}" for name, modules in doubled_names().items()]
    print(*broken, sep="\n", end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
