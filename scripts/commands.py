"""Runs a command by its name: `python scripts/reproduce NAME ..`, and likewise `bench`, `checks` and `faults.py`.

A command is a function of its name, which is given a parser and the words to parse; what it does stands
in its docstring.
"""

import argparse
import ast
import inspect
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows a description as it is, and the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if "default" in text or action.default in (None, False, argparse.SUPPRESS):
            return action.help
        return f"{text} (default: %(default)s)".strip()


def main(program: str, commands: Mapping[str, str]) -> int:
    """Run the command that the command line names, or list all of them.

    Args:
        program: Its name below `scripts/`.
        commands: By name, the module that has the function.
    """
    name, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--list", [])
    if name in {"--list", "--help", "-h"}:
        width = max(map(len, commands))
        for one, module in commands.items():
            print(f"{one:<{width}}  {summary(one, module)}")
        return 0
    if name not in commands:
        print(f"{program}: no command {name}; --list tells them", file=sys.stderr)
        return 2
    # So that the processes that it starts end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return perform(commands[name], name, words)


def perform(module: str, name: str, words: Sequence[str]) -> int:
    """Run a command of a module; return its exit status."""
    function = getattr(import_module(module), name.replace("-", "_"))
    parser = argparse.ArgumentParser(
        prog=f"{module.partition('.')[0]} {name}",
        description=inspect.getdoc(function),
        formatter_class=_Help,
    )
    return function(parser, words) or 0


def summary(name: str, module: str) -> str:
    """Return the first line of what a command says of itself, without the libraries that it needs."""
    tree = ast.parse((HERE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (function,) = (
        one
        for one in tree.body
        if isinstance(one, ast.FunctionDef) and one.name == name.replace("-", "_")
    )
    return (ast.get_docstring(function) or "").splitlines()[0]
