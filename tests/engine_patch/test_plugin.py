"""The entry point: asked for or inert, in every kind of process that vLLM loads it in."""

import logging
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from balanceroute.engine_patch import plugin
from balanceroute.engine_patch.plugin import ENGINE_CORE, VARIABLE, register
from balanceroute.engine_patch.reader import read_steps

ROOT = Path(__file__).parents[2]


class Core:
    """An engine core whose step says whether it is hooked."""

    def _process_engine_step(self) -> bool:
        return False


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> type[Core]:
    """Stand for the loaded module with a fresh class."""

    class FreshCore(Core):
        pass

    monkeypatch.setitem(sys.modules, ENGINE_CORE, SimpleNamespace(EngineCoreProc=FreshCore))
    return FreshCore


def is_hooked(core: type[Core]) -> bool:
    return "_process_engine_step" in vars(core)


def test_the_package_declares_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name, target), *others = project["entry-points"]["vllm.general_plugins"].items()
    assert not others
    assert name == "balanceroute_steps"
    module, function = target.split(":")
    assert getattr(import_module(module), function) is register


def test_without_the_variable_nothing_happens(
    core: type[Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    monkeypatch.setenv(VARIABLE, "")
    register()
    assert not is_hooked(core)


def test_an_engine_core_is_hooked_and_the_folder_made(
    core: type[Core], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "deep" / "trace"))
    register()
    register()
    assert is_hooked(core)
    assert (tmp_path / "deep" / "trace").is_dir()


@pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(EngineCoreProc=object)])
def test_an_engine_core_of_another_shape_gets_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    module: SimpleNamespace,
) -> None:
    monkeypatch.setitem(sys.modules, ENGINE_CORE, module)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "engine steps are not traced" in record.getMessage()


def test_a_folder_that_cannot_be_made_gets_one_warning(
    core: type[Core],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "trace"))
    register()
    assert not is_hooked(core)
    assert len(caplog.records) == 1


def test_a_process_without_an_engine_core_hooks_those_that_it_forks(tmp_path: Path) -> None:
    program = f"""
import os, sys, types
from {plugin.__name__} import register, ENGINE_CORE
class Core:
    def _process_engine_step(self): ...
step = Core._process_engine_step
register()
assert ENGINE_CORE not in sys.modules
sys.modules[ENGINE_CORE] = types.SimpleNamespace(EngineCoreProc=Core)
child = os.fork()
if not child:
    os._exit(Core._process_engine_step is step)
assert Core._process_engine_step is step
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_engines_process_loads_nothing_but_the_standard_library() -> None:
    program = f"""
import sys
before = set(sys.modules)  # An installation may have a sitecustomize.
import {plugin.__name__}
names = {{name.split(".")[0] for name in sys.modules.keys() - before}} - sys.stdlib_module_names
print(*sorted(name for name in names if not name.startswith("__")))
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    # The editable install's finder, if there is one, comes from outside.
    assert [n for n in result.stdout.split() if not n.startswith("_")] == ["balanceroute"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_by_itself_loses_nothing(tmp_path: Path, method: str) -> None:
    program = tmp_path / "engine.py"
    program.write_text(f"""
import multiprocessing
import types
from pathlib import Path
from balanceroute.engine_patch.hooks import install

class Scheduler:
    running = ()
    def schedule(self):
        return types.SimpleNamespace(
            total_num_scheduled_tokens=1, num_scheduled_tokens={{"a": 1}}, scheduled_new_reqs=[],
            scheduled_cached_reqs=types.SimpleNamespace(num_computed_tokens=[41]),
        )
    def update_from_output(self, scheduler_output): ...

class Core:
    def __init__(self):
        self.scheduler = Scheduler()
    def _process_engine_step(self):
        self.scheduler.update_from_output(self.scheduler.schedule())
    def execute_dummy_batch(self): ...

def run():
    install(Core, Path({str(tmp_path)!r}))
    Core()._process_engine_step()

if __name__ == "__main__":
    child = multiprocessing.get_context({method!r}).Process(target=run)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
""")
    subprocess.run([sys.executable, str(program)], check=True, timeout=50)
    (path,) = tmp_path.glob("*.steps")
    assert read_steps(path).steps["kv_tokens"].tolist() == [42]
