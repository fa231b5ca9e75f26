"""Points the tests of vLLM and of SMG at a server that runs: a plugin of pytest, in an environment without ours.

    SUITE_URL=http://host:port SUITE_OUTCOMES=FILE python -m pytest -p suites_plugin ..

The suites' own starters of engines and gateways start none: they use the server at `SUITE_URL`. The plugin leaves out
tests that speak to no server, as they would pass before any, and draws `SUITE_MOST` of the rest, the same ones each
time. It writes the outcome of each test, and the last line of what went wrong, to `SUITE_OUTCOMES`, as JSON by the test's id.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import anthropic  # type: ignore[import-not-found]
import openai  # type: ignore[import-not-found]
import pytest

_URL = os.environ["SUITE_URL"]
_MODEL = os.environ["SUITE_MODEL"]
_OUTCOMES: dict[str, tuple[str, str]] = {}
# Of fixtures through which a test gets at a server.
_SERVES = ("server", "client", "setup_backend")
_NOT_DRAWN = ("not drawn", "")
_WORST = ("passed", "skipped", "failed")


def _attach() -> None:
    """Have vLLM's own class for a server stand for the one that runs."""
    server: Any = import_module("tests.utils").RemoteOpenAIServer

    def begin(self: Any, model: str, vllm_serve_args: list[str], **_options: object) -> None:
        split = urlsplit(_URL)
        self.host, self.port, self.uds, self.show_hidden_metrics = (
            split.hostname,
            split.port,
            None,
            False,
        )
        if "--uds" in vllm_serve_args:
            pytest.skip("a server of its own")

    server.__init__ = begin
    server.__exit__ = lambda self, *_error: None


class Absent(ModuleType):
    """Stands for a package that a suite imports and that no test of ours reaches: SMG's own client, pandas."""

    def __getattr__(self, name: str) -> Any:
        """Return an exception's type that is never raised: tests name them beside the openai package's."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


if os.environ["SUITE_NAME"] == "vllm":
    _attach()
else:
    sys.modules.update({name: Absent(name) for name in ("smg_client", "pandas")})


class Gateway:
    """What the tests of SMG ask their gateway."""

    base_url = _URL


@pytest.fixture(scope="class")
def setup_backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Any, Gateway]]:
    """As in SMG's suite, without a process of its own."""
    name = str(request.param)
    client: Any
    if name == "anthropic":
        client = anthropic.Anthropic(base_url=_URL, api_key="none", max_retries=0)
    else:
        client = openai.OpenAI(base_url=f"{_URL}/v1", api_key="none", max_retries=0)
    yield name, _MODEL, client, Gateway()
    client.close()


@pytest.fixture
def model(setup_backend: tuple[str, str, Any, Gateway]) -> str:
    """Return the model's name."""
    return setup_backend[1]


@pytest.fixture
def api_client(setup_backend: tuple[str, str, Any, Gateway]) -> Any:
    """Return a client of the library that a test is about."""
    return setup_backend[2]


def _is_asked(item: pytest.Item) -> bool:
    """Return whether a test speaks to a server; SMG's second client is of its gateway alone."""
    names = getattr(item, "fixturenames", ())
    return os.environ["SUITE_NAME"] == "nixl" or (
        any(word in name for name in names for word in _SERVES)
        and not any(word in item.nodeid for word in ("-smg", "[smg"))
        and "hf_model" not in names
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests without a server, and those that are not drawn, which are noted."""
    items[:] = filter(_is_asked, items)
    most = int(os.environ["SUITE_MOST"]) or len(items)
    drawn = set(random.Random(7).sample(range(len(items)), min(most, len(items))))
    _OUTCOMES.update({one.nodeid: _NOT_DRAWN for i, one in enumerate(items) if i not in drawn})
    items[:] = [one for i, one in enumerate(items) if i in drawn]
    for one in items:
        # Seconds after each test, for engines in the process of the tests.
        one.add_marker("skip_global_cleanup")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the worst outcome of a test's three phases."""
    before = _OUTCOMES.get(report.nodeid, ("passed", ""))
    if _WORST.index(report.outcome) > _WORST.index(before[0]):
        reason = ""
        if report.longrepr is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr)[:600]
        before = report.outcome, reason
    _OUTCOMES[report.nodeid] = before
    # Each time: the run may be ended from outside.
    Path(os.environ["SUITE_OUTCOMES"]).write_text(json.dumps(_OUTCOMES))
