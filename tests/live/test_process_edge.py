"""What every process of the proxy does at its start."""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.served import STREAM
from tests.native import needs_native
from tests.script import script
from tests.support.site import Site, play

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.process_edge import _native_library
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.wire.http1 import pump

house = script("house")

FAULTS = """
import resource
from balanceroute.proxy.live.process_edge import settle_memory

settle_memory()
for number in range(23):
    bodies = [b"x" * (1 << 20) for _ in range(4)]
    del bodies
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not GNU's C library")
def test_what_large_bodies_leave_behind_is_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    # Of 20,480 pages of 4 KiB.
    assert int(done.stdout) < 2_000


def config_of(native: str) -> ProxyConfig:
    return make_config(None, {"prefill": ["http://p"], "decode": ["http://d"], "native": native})


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "_PACKAGE", "balanceroute_is_not_installed")


@pytest.mark.usefixtures("no_library")
def test_without_the__native_library_python_does_all_of_it() -> None:
    for native in ("auto", "off"):
        assert _native_library(config_of(native)) is None
    with pytest.raises(ConfigError, match=r"--native require: .* is not installed"):
        _native_library(config_of("require"))


@needs_native
def test_a_library_is_used_unless_it_is_not_wanted(tmp_path: Path) -> None:
    assert _native_library(config_of("off")) is None
    for native in ("auto", "require"):
        assert _native_library(config_of(native)) is not None


def test_a_library_that_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "balanceroute_broken"
    package.mkdir()
    (package / "libbalanceroute_native.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(pump, "_PACKAGE", "balanceroute_broken")
    assert _native_library(config_of("auto")) is None
    assert "cannot be loaded" in caplog.text
    with pytest.raises(ConfigError, match=r"--native require: .* cannot be loaded"):
        _native_library(config_of("require"))


START = """
import json, sys
from balanceroute.proxy.wire.http1 import pump
pump._PACKAGE = "balanceroute_is_not_installed"
from balanceroute.proxy.__main__ import main
sys.argv = ["balanceroute", "serve", "--native", "require", *json.loads(sys.argv[1])]
sys.exit(main())
"""


def test_a_library_that_is_required_and_not_there_is_an_error_at_the_start() -> None:
    words = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps([*words, "--admin-port", "0"])],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("balanceroute: --native require: the native ")
    assert "Traceback" not in done.stderr


def test_in_virtual_time_nothing_is_moved_natively() -> None:
    """It has no descriptors: only the edge of a real process makes a pump, whatever is installed."""
    makers = [
        house.module(path)
        for path in house.python_files("proxy")
        if re.search(r"\bPump\(", path.read_text(encoding="utf-8"))
    ]
    assert makers == ["proxy.live.process_edge"]

    async def scenario(site: Site) -> None:
        answer = await site.post("/v1/completions", STREAM)
        assert answer.done
        assert b"balanceroute_pumped_streams_total 0" in (await site.get("/metrics")).body

    play(scenario)
