"""Reads and runs the scripts: `scripts/` is no package."""

import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """Return the module `scripts/NAME.py`, a dotted name."""
    if (folder := str(ROOT / "scripts")) not in sys.path:
        sys.path.append(folder)
    return import_module(name)


def run_script(line: str) -> int:
    """Run `python scripts/LINE` in this process; return its exit status."""
    program, name, *words = shlex.split(line)
    return int(script("commands").perform(commands_of(program)[name], name, words))


def commands_of(program: str) -> dict[str, str]:
    """Return the module of each command of a program below `scripts/`."""
    folder = (ROOT / "scripts" / program).is_dir()
    module = script(f"{program}.__main__" if folder else program.removesuffix(".py"))
    found: dict[str, str] = module.COMMANDS
    return found
