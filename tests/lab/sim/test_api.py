"""`balanceroute.simulate`, policies from outside, and the examples of docs/scheduling.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.script import ROOT

import balanceroute
from balanceroute import simulate
from balanceroute.proxy.__main__ import main
from balanceroute.proxy.core.errors import ConfigError, PolicyError
from balanceroute.traces import TraceRequest, read_trace

PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
MINE, EXAMPLE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BAD = """
def never(inputs): return OldestFirst(lambda fleet, entry: None, slots_beyond_batch=0)
def beyond(inputs): return OldestFirst(lambda fleet, entry: 99, slots_beyond_batch=0)
def number(inputs): return 3
def broken(inputs): raise RuntimeError("no luck")
not_callable = 7
divides = lambda inputs: OldestFirst(lambda fleet, entry: 1 // 0, slots_beyond_batch=0)
"""
LAST_LINE = len(f"{MINE}\n{BAD}".splitlines())
TRACE = [TraceRequest(i * 10**7, 50 + 7 * i % 90, 20 + 11 * i % 30) for i in range(60)]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the page's `mine.py`, and some faulty policies in it."""
    (tmp_path / "mine.py").write_text(f"{MINE}\n{BAD}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.splitlines()) <= 15
    exec(compile(EXAMPLE, "docs/scheduling.md", "exec"), {})  # noqa: S102 - our own page.
    assert re.fullmatch(
        r"jsq +\d+\.\d % idle, +[\d,]+ tokens/s\nbr-h +\d+\.\d % idle, .*\n",
        capsys.readouterr().out,
    )


def test_the_figures_are_those_of_the_command(tmp_path: Path) -> None:
    words = "--trace azure_2023_code --requests 60 --ranks 2 --batch 4 --backlog 8 --policy fifo"
    out = tmp_path / "out.json"
    assert main(["simulate", *words.split(), "--json", str(out)]) == 0
    (result,) = simulate(
        "azure_2023_code", policies=["fifo"], ranks=2, batch=4, backlog=8, requests=60
    )
    assert f'"steps": {result.mean["steps"]}' in out.read_text()
    assert f'"idle_fraction": {result.mean["idle_fraction"]}' in out.read_text()


def test_requests_of_ones_own_are_taken_as_they_are() -> None:
    by_name = simulate("azure_2023_code", policies=["jsq"], requests=40)
    read = read_trace("azure_2023_code")
    assert (
        by_name[0].mean["steps"] == simulate(read, policies=["jsq"], requests=40)[0].mean["steps"]
    )


@pytest.mark.usefixtures("outside")
def test_a_policy_of_the_working_directory_is_compared() -> None:
    jsq, mine = simulate(TRACE, policies=["jsq", "mine:policy"], ranks=2, batch=4, backlog=8)
    assert mine.policy == "mine:policy"
    assert mine.mean["output_tokens_per_s"] == pytest.approx(
        jsq.mean["output_tokens_per_s"], rel=0.2
    )


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("mine:never", PolicyError, "0 of 60 requests ended"),
        ("mine:beyond", PolicyError, "IndexError"),
        ("mine:divides", PolicyError, f"mine.py:{LAST_LINE}: ZeroDivisionError"),
        (
            "mine:number",
            ConfigError,
            "3 has no slots_beyond_batch, projection, next_decision_ns, d",
        ),
        ("mine:broken", ConfigError, "cannot be made: no luck"),
        ("mine:not_callable", ConfigError, "cannot be made: 'int' object is not callable"),
        ("mine:absent", ConfigError, "cannot be imported: module 'mine' has no attribute 'absent'"),
        ("absent:policy", ConfigError, "cannot be imported: No module named 'absent'"),
        ("mine", ConfigError, "unknown policy 'mine'"),
        ("a b:c", ConfigError, "unknown policy 'a b:c'"),
    ],
)
def test_a_faulty_policy_is_named_with_its_fault(
    name: str, error: type[Exception], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=re.escape(reason)) as failed:
        simulate(TRACE, policies=[name], ranks=2, batch=4, backlog=8)
    assert repr(name) in str(failed.value)
    words = "simulate --trace azure_2023_code --requests 60 --policy"
    assert main([*words.split(), name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_package_is_as_light_as_before() -> None:
    code = "import balanceroute, sys; assert 'numpy' not in sys.modules; balanceroute.simulate"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = balanceroute.simulat


def test_a_table_of_ones_own_is_read_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = (f"{one.arrival_ns / 1e9},{one.prompt_tokens},{one.output_tokens}\n" for one in TRACE)
    path.write_text("when,in,out\n" + "".join(rows))
    columns = {"arrival": "when", "prompt": "in", "output": "out"}
    (read,) = simulate(path, policies=["fifo"], ranks=2, batch=4, backlog=8, columns=columns)
    (same,) = simulate(TRACE, policies=["fifo"], ranks=2, batch=4, backlog=8)
    assert read.picture == same.picture
    with pytest.raises(ConfigError, match="columns: output is missing"):
        simulate(path, columns={"arrival": "when", "prompt": "in"})
    with pytest.raises(ConfigError, match="columns: 'when' is none of arrival, prompt"):
        simulate(path, columns={"when": "arrival"})
    with pytest.raises(ConfigError, match="columns: are those of a file"):
        simulate(TRACE, columns=columns)


def test_a_result_shows_a_line() -> None:
    (result,) = simulate(TRACE, policies=["fifo"], ranks=2, batch=4, backlog=8)
    assert repr(result).startswith("PolicyResult('fifo', idle_fraction=")
    assert len(repr([result])) < 160


def test_the_package_runs_as_a_module() -> None:
    for module in ("balanceroute", "balanceroute.proxy"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, check=True, text=True
        )
        assert done.stdout == f"balanceroute {balanceroute.__version__}\n"
