"""The client libraries, each kind in an environment of its own, and how their checks are run.

Their dependencies contradict each other, and some of this project's.
"""

import json
import subprocess
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting import FOUND_FAULTS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CHECK_S = 600.0
_TOO_LONG = 124
_INSTALL_S = 1200.0


@dataclass(frozen=True)
class Result:
    """One check: which client, what, and what went wrong; None if nothing did."""

    client: str
    check: str
    fault: str | None


@dataclass(frozen=True)
class Kit:
    """Client libraries that go together.

    Attributes:
        name: Of the environment, in build/clients.
        packages: From the package index.
    """

    name: str
    packages: tuple[str, ...]

    @property
    def python(self) -> Path:
        """The environment's Python."""
        return ROOT / "build" / "clients" / self.name / "bin" / "python"

    def install(self) -> None:
        """Make the environment, as far as it is not there."""
        done = self.python.parents[1] / ".complete"
        wanted = " ".join(self.packages)
        if done.exists() and done.read_text() == wanted:
            return
        print(f"installing {wanted} into {self.python.parents[1]}", flush=True)
        venv.create(self.python.parents[1], with_pip=True)
        pip = (self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        made = run(*pip, *self.packages, limit_s=_INSTALL_S)
        if made.returncode:
            raise SystemExit(made.stderr)
        done.write_text(wanted)


OPENAI = Kit("openai", ("openai",))
LOAD_TOOL = Kit("aiperf", ("aiperf",))
SCHEMA = Kit("schemathesis", ("schemathesis",))
FRAMEWORKS = (
    Kit("anthropic", ("anthropic",)),
    Kit("litellm", ("litellm", "mcp")),  # The latter for tools.
    Kit("langchain", ("langchain-openai", "langchain-anthropic")),
)


def run(*command: object, limit_s: float = CHECK_S) -> subprocess.CompletedProcess[str]:
    """Run a command; its exit status is in the result, 124 if it was ended as it took too long."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        # Bytes even if text was asked for.
        said: Any = error.stdout or b""
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        reason = f"not within {limit_s:g} s"
        return subprocess.CompletedProcess(words, _TOO_LONG, text, reason)


def check_script(kit: Kit, name: str, *arguments: str) -> Iterator[Result]:
    """Run one of the scripts beside this one; see `reporting.py` for what it prints."""
    done = run(kit.python, HERE / f"{name}_checks.py", *arguments)
    version, *lines = done.stdout.splitlines() or ["?"]
    for line in lines:
        check, fault = json.loads(line)
        yield Result(f"{name} {version}", check, fault)
    # Any other status is that of a script that broke.
    if not lines or done.returncode not in (0, FOUND_FAULTS):
        yield Result(f"{name} {version}", "runs", f"{done.returncode}: {done.stderr[-500:]}")


def check_frameworks(url: str, model: str, *left_out: str) -> Iterator[Result]:
    """Run the packages that applications are built on, without checks whose names begin so."""
    for kit in FRAMEWORKS:
        kit.install()
        yield from check_script(kit, kit.name, url, model, *left_out)


def check_schema(url: str, model: str, engine_url: str, examples: int) -> Iterator[Result]:
    """Compare the proxy with one of its engines, on requests that vLLM's schema describes."""
    SCHEMA.install()
    yield from check_script(SCHEMA, "schema", url, model, engine_url, str(examples))


def report(results: Sequence[Result]) -> int:
    """Print a table; return the number of failures."""
    for result in results:
        fault = "ok" if result.fault is None else f"FAILED: {result.fault[:600]}"
        print(f"{result.client:<22} {result.check:<50} {fault}")
    failed = sum(result.fault is not None for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return failed
