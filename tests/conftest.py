"""Settings for every test: Hypothesis is deterministic unless told to search deeply.

`HYPOTHESIS_PROFILE=deep make test` draws many new examples instead.
"""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import settings

# As the command line does; before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from process to process: `-n` shares tests out by their names."""
    for item in items:
        assert " object at 0x" not in item.name, f"{item.nodeid}: give its cases ids"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests themselves, a million objects, out of every garbage collection."""
    gc.disable()  # Nearly nothing is garbage, and each look for some takes longer than the last.
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def end_by_signals() -> Iterator[None]:
    """Let the tests be ended from outside: uvloop leaves its handlers behind when a loop is closed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def cyclic() -> Iterator[Callable[[], Counter[str]]]:
    """Return what counts the package's objects that nobody has but each other, by class, and frees them.

    Only the garbage collector frees such objects, and it does not know how large they are.
    """

    def count() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        own = [type(one) for one in gc.garbage if type(one).__module__.startswith("balanceroute.")]
        gc.garbage.clear()
        gc.collect()
        return Counter(one.__name__ for one in own)

    gc.collect()
    gc.disable()
    yield count
    gc.enable()
