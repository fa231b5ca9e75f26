"""Both event loops for tests that are coroutines, and TLS."""

import asyncio
import inspect
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests.extended import usually
from tests.support.certificate import CERT, KEY

PATIENCE_S = 10.0  # Only ever waited for by a test that fails.

NewLoop = Callable[[], asyncio.AbstractEventLoop]
Run = Callable[[Coroutine[Any, Any, None]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have event loops run each test that is a coroutine, or takes `run`, and names none itself.

    Always the one that serves, uvloop's. Asyncio's own, whose buffers, half-closes and cancellations differ, in
    `make test` where the test is marked `both_loops`.
    """
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("new_loop")
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "new_loop" in metafunc.fixturenames and "new_loop" not in named:
        usual = {"uvloop"}
        if metafunc.definition.get_closest_marker("both_loops"):
            usual.add("asyncio")
        loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
        metafunc.parametrize("new_loop", usually(usual, loops.values(), ids=loops))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    run_silently(cast("NewLoop", pyfuncitem.callspec.params["new_loop"]), test)
    return True


def run_silently(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; nothing may be left behind or reported to the loop's exception handler."""
    reported: list[dict[str, Any]] = []

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        async with asyncio.timeout(PATIENCE_S):
            await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(guarded())
    assert not reported


@pytest.fixture
def run(new_loop: NewLoop) -> Run:
    """Return `run_silently` for a test that Hypothesis calls many times, which is no coroutine."""
    return partial(run_silently, new_loop)


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS contexts of a server and of a client that trusts it."""
    path = tmp_path / "localhost.pem"
    path.write_text(CERT + KEY)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=CERT)
