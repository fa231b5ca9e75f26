"""The outputs of a command: files, known to be writable before its work and written whole; its terms."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.pictures import require_matplotlib

STDOUT = Path("-")


def options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return a command's settings, as its report repeats them."""
    # Those two say what to run and how it was called.
    return {name: value for name, value in vars(arguments).items() if name not in ("run", "words")}


def check_output(flag: str, path: Path | None) -> None:
    """Find out now that a file cannot be written later. `-` is standard output.

    Raises:
        ConfigError: Its folder is none, it is a folder, or the system does not let us write it.
    """
    if path in (None, STDOUT):
        return
    assert path is not None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {path.parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written: permission denied")


def add_output_flags(group: "argparse._ActionsContainer", *, plots: bool = True) -> None:
    """Add `--json` and `--plots`."""
    group.add_argument(
        "--json", type=Path, metavar="OUT", help="write the figures as JSON; - is standard output"
    )
    if plots:
        group.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (PNG)")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Find out now, not after the work, that its figures cannot be written.

    Raises:
        ConfigError: What `--json` or `--plots` names cannot be written, or pictures cannot be drawn.
    """
    check_output("--json", arguments.json)
    make_plots_folder(getattr(arguments, "plots", None))


def answer(
    arguments: argparse.Namespace, show: Callable[[], None], report: Callable[[], str]
) -> None:
    """Print the figures for people, and write their JSON text if it is asked for.

    Raises:
        ConfigError: The file cannot be written.
    """
    with for_people(arguments.json):
        show()
    if arguments.json is not None:
        write_output("--json", arguments.json, report())


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)  # noqa: T201 - the command line's answer.


def make_plots_folder(path: Path | None) -> None:
    """Make the folder of --plots, before hours of work on the pictures' data.

    Raises:
        ConfigError: It cannot be made, or pictures cannot be drawn.
    """
    if path is None:
        return
    require_matplotlib()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots: {path}: {error.strerror}") from error


def write_output(flag: str, path: Path, text: str) -> None:
    """Write a file, or standard output for `-`; a file that is cut short, as on a full disk, is removed.

    Raises:
        ConfigError: It cannot be written.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise ConfigError(f"{flag}: {path}: {error.strerror}") from error


def as_json_text(report: object) -> str:
    """Return a report as JSON text; a figure that is no number is null, as JSON has no NaN."""
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2, allow_nan=False) + "\n"


def for_people(written: Path | None) -> AbstractContextManager[object]:
    """Return a context in which tables go to standard error if `written` takes standard output."""
    return redirect_stdout(sys.stderr) if written == STDOUT else nullcontext()


# Where a long command is: a bar at a terminal, else a line now and then.

_LINE_S = 30.0


class PipedProgress:
    """Writes a line to standard error each half minute, if that is no terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_on = not sys.stderr.isatty()
        self._due_s = clock() + _LINE_S

    def write(self, words: str) -> None:
        """Write where the command is, if that is due."""
        if self._is_on and self._clock() >= self._due_s:
            self._due_s = self._clock() + _LINE_S
            sys.stderr.write(f"balanceroute: {words}\n")
            sys.stderr.flush()


class StageBar:
    """Shows the present stage of several on standard error while it is entered."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._piped = PipedProgress()
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, stage: str, share: float | None = None) -> None:
        """Show how much of a stage is done; None if that is not known."""
        if self._task is None or stage != self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(stage, total=None if share is None else 1.0)
            self._stage = stage
        if share is not None:
            self._bar.update(self._task, completed=share)
        self._piped.write(stage if share is None else f"{stage}: {share:.0%}")
