"""The commands and files in a Markdown page, and how a page says which of them cannot run here.

A command block is indented or fenced as `sh`, and its first line begins with a word of `COMMANDS`. A comment on
a line of its own before a block, `<!-- not run: REASON -->`, says that it takes another machine or minutes; its
commands are still parsed. A block fenced as `toml` is a topology.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

COMMANDS = frozenset(
    {
        "balanceroute",
        "curl",
        "python",
        "make",
        "pip",
        "git",
        "cp",
        "vllm",
        "docker",
        "kubectl",
        "export",
    }
)
_NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
_FENCE = re.compile(r"^```(\w*)$")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    place: str  # Page and line.
    kind: str  # "sh" or "toml"; "" for an indented one, or a fenced one that says nothing.
    text: str  # What is in it.
    not_run: str | None  # Why it cannot run here; None if it can.

    @property
    def is_commands(self) -> bool:
        """Whether its first command is one."""
        first = next(filter(None, map(_first, self.commands())), "")
        return self.kind in ("", "sh") and first in COMMANDS

    def commands(self) -> list[list[str]]:
        """Return the words of each command, comments and line ends gone."""
        if self.kind == "toml":
            return []
        joined = re.sub(r"\\\n\s*", " ", self.text)
        try:
            split = [shlex.split(line, comments=True) for line in joined.splitlines()]
        except ValueError:  # Prose or a formula: an apostrophe opens a text that does not end.
            return []
        return [words for words in split if words]


def _first(words: list[str]) -> str:
    """Return the command behind settings of the environment; "" if there is none."""
    named = [word for word in words if not re.match(r"^[A-Z_]+=", word)]
    return "python" if named and named[0].startswith("scripts/") else named[0] if named else ""


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    kind: str | None = None
    body: list[str] = []
    begin, before, fenced = 0, "", False
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], start=1):
        fence = _FENCE.match(line)
        indented = line.startswith("    ")
        if kind is None and (fence or (indented and not lines_of_list(before))):
            kind, body, begin = (fence[1] if fence else "", [] if fence else [line], number)
            fenced = bool(fence)
        elif kind is not None and (
            line == "```" if fenced else not indented and bool(line.strip())
        ):
            found.append(_block(page, begin, kind, body, before))
            kind, before = None, line
        elif kind is not None and (fenced or indented):
            body.append(line)
        elif kind is None and line.strip():
            before = line
    if kind is not None:
        found.append(_block(page, begin, kind, body, before))
    return found


def lines_of_list(before: str) -> bool:
    """Tell whether what is indented after this line belongs to a list, not to a block."""
    return bool(re.match(r"^ *([*-]|\d+\.) ", before))


def _block(page: Path, begin: int, kind: str, body: list[str], before: str) -> Block:
    mark = _NOT_RUN.fullmatch(before)
    text = "\n".join(line.removeprefix("    ") if not kind else line for line in body)
    return Block(f"{page.name}:{begin}", kind, text, mark and mark[1])
