"""The options that an engine's version knows, and those of a topology that it does not.

Lists of some versions are in `options/`. The installed engine's own parser knows more: `balanceroute
topology check` asks it where there is one.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.findings import Finding, Level
from balanceroute.topologies.tables import did_you_mean

_FOLDER = Path(__file__).with_name("options")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What one version of an engine knows, by name with underscores.

    Attributes:
        engine: Its name and version, as in "vllm 0.32.0".
        flags: Of `vllm serve`.
        compilation: Keys of `--compilation-config`.
        kv_transfer: Keys of `--kv-transfer-config`.
        variables: Of the environment, those that begin with VLLM_.
        additional: Keys of `--additional-config`; empty if it has none of its own.
        additional_later: Those of later versions, which it ignores.
    """

    engine: str
    flags: frozenset[str]
    compilation: frozenset[str]
    kv_transfer: frozenset[str]
    variables: frozenset[str]
    additional: frozenset[str]
    additional_later: frozenset[str]


def known_options(engines: Engines) -> tuple[EngineOptions, bool]:
    """Return the list for the engines' version, or the latest of that engine, and whether it is theirs."""
    engine = "vllm-ascend" if engines.device == "npu" else "vllm"
    paths = {path.stem: path for path in _FOLDER.glob(f"{engine}-[0-9]*.toml")}
    named = f"{engine}-{engines.version}"
    chosen = named if named in paths else max(paths, key=_number)
    return _read(paths[chosen]), chosen == named


def check_options(engines: Engines) -> Iterator[Finding]:
    """Yield the options that the engines' version does not know.

    They are errors only where the list is that of the file's version.
    """
    options, theirs = known_options(engines)
    level: Level = "error" if theirs else "note"
    reported: set[str] = set()
    for role in engines.roles:
        for place, names, known in _used(role, options):
            for name in names:
                if name in known or f"{place}.{name}" in reported:
                    continue
                reported.add(f"{place}.{name}")
                reason = (
                    f"{options.engine} knows no such {_NOUNS[place]}{did_you_mean(name, known)}"
                )
                # An engine ends over the former, and passes over the latter.
                fatal = place in ("flags", "compilation", "kv_transfer")
                yield Finding(
                    level if fatal else "note", f"engines.{role.role}.{place}.{name}", reason
                )


_NOUNS = {
    "flags": "option",
    "compilation": "key of --compilation-config",
    "kv_transfer": "key of --kv-transfer-config",
    "environment": "variable",
    "additional": "key of --additional-config",
}


def _used(
    role: RoleEngines, options: EngineOptions
) -> Iterator[tuple[str, Mapping[str, object], frozenset[str]]]:
    yield "flags", role.flags, options.flags
    yield "compilation", role.compilation, options.compilation
    yield "kv_transfer", role.kv_transfer, options.kv_transfer
    own = {name: value for name, value in role.environment.items() if name.startswith("VLLM_")}
    yield "environment", own, options.variables
    if options.additional:
        yield "additional", role.additional, options.additional | options.additional_later


def _read(path: Path) -> EngineOptions:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    words = {
        field.name: frozenset(content.get(field.name, "").split())
        for field in fields(EngineOptions)
        if field.name != "engine"
    }
    name, _, version = path.stem.rpartition("-")
    return EngineOptions(engine=f"{name} {version}", **words)


def _number(stem: str) -> tuple[int, ...]:
    return tuple(map(int, stem.rpartition("-")[2].split(".")))
