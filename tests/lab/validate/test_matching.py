"""Which trace is which rank's: by port, data-parallel rank and host, or as the operator says."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.lab.validate.traces import ValidationError, match, read_traces

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteSteps

START_NS = 1_795_000_000_000_000_000
SPAN_NS = (START_NS, START_NS + 10**9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "steps"


def matched(folder: Path, *names: str, given: Mapping[str, Path] | None = None) -> dict[str, str]:
    found = match(read_traces(folder), names, given=given or {}, span_ns=SPAN_NS)
    return {name: trace.path.stem for name, trace in found.items()}


def engines(write_steps: "WriteSteps", **headers: Mapping[str, Any]) -> None:
    for name, header in headers.items():
        write_steps(name, [5, 6], [10, 10], header=header)


def test_by_port(write_steps: "WriteSteps", folder: Path) -> None:
    engines(
        write_steps,
        prefill={"port": 8100, "dp_rank": 0, "kv_role": "kv_producer"},
        one={"port": 8201, "dp_rank": 0, "kv_role": "kv_consumer"},
        two={"port": 8202, "dp_rank": 0},
    )
    names = ("http://10.0.0.2:8202", "http://10.0.0.1:8201", "http://10.0.0.1:8100")
    assert matched(folder, *names) == {names[0]: "two", names[1]: "one"}


def test_by_port_and_data_parallel_rank(write_steps: "WriteSteps", folder: Path) -> None:
    engines(write_steps, a={"port": 8000, "dp_rank": 1}, b={"port": 8000, "dp_rank": 0})
    assert matched(folder, "http://h:8000@0", "http://h:8000@1") == {
        "http://h:8000@0": "b",
        "http://h:8000@1": "a",
    }


def test_a_url_without_a_port_has_its_schemes(write_steps: "WriteSteps", folder: Path) -> None:
    engines(write_steps, a={"port": 80, "dp_rank": 0}, b={"port": 443, "dp_rank": 0})
    assert matched(folder, "http://h", "https://[::1]") == {"http://h": "a", "https://[::1]": "b"}


def test_of_two_that_fit_the_host_decides(write_steps: "WriteSteps", folder: Path) -> None:
    engines(
        write_steps,
        a={"port": 8000, "dp_rank": 0, "host": "node-1"},
        b={"port": 8000, "dp_rank": 0, "host": "node-2"},
    )
    assert matched(folder, "http://node-2:8000") == {"http://node-2:8000": "b"}
    with pytest.raises(ValidationError, match=r"fits several traces, a\.steps, b\.steps: choose"):
        matched(folder, "http://10.0.0.1:8000")


def test_a_servers_ranks_may_be_counted_from_0(write_steps: "WriteSteps", folder: Path) -> None:
    engines(
        write_steps,
        a={"port": 8000, "dp_rank": 0, "host": "node-1"},
        b={"port": 8000, "dp_rank": 1, "host": "node-1"},
        c={"port": 8000, "dp_rank": 2, "host": "node-2"},
        d={"port": 8000, "dp_rank": 3, "host": "node-2"},
    )
    names = [f"http://node-{node}:8000@{rank}" for node in (1, 2) for rank in (0, 1)]
    assert matched(folder, *names) == dict(zip(names, "abcd", strict=True))
    with pytest.raises(
        ValidationError, match=r"a\.steps fits http://10\.0\.0\.1:8000@0 and http://10\.0\.0\.2"
    ):
        matched(folder, "http://10.0.0.1:8000@0", "http://10.0.0.2:8000@0")


def test_a_second_server_of_the_same_host_has_its_own_port(
    write_steps: "WriteSteps", folder: Path
) -> None:
    engines(
        write_steps,
        a={"port": 8000, "dp_rank": 0},
        b={"port": 8000, "dp_rank": 1},
        c={"port": 8001, "dp_rank": 2},
        d={"port": 8001, "dp_rank": 3},
    )
    names = [f"http://h:{port}@{rank}" for port in (8000, 8001) for rank in (0, 1)]
    assert matched(folder, *names) == dict(zip(names, "abcd", strict=True))


def test_the_traces_of_another_run_do_not_fit(write_steps: "WriteSteps", folder: Path) -> None:
    header = {"port": 8000, "dp_rank": 0}
    write_steps("before", [5], [10], header=header, begin_ns=START_NS - 10**10)
    write_steps("now", [5], [10], header=header)
    write_steps("later", [5], [10], header=header, begin_ns=START_NS + 10**10)
    assert matched(folder, "http://h:8000") == {"http://h:8000": "now"}


def test_without_ports_the_data_parallel_ranks_tell(
    write_steps: "WriteSteps", folder: Path
) -> None:
    engines(write_steps, a={"port": None, "dp_rank": 1}, b={"port": None, "dp_rank": 0})
    assert matched(folder, "http://h:8000@0", "http://h:8000@1") == {
        "http://h:8000@0": "b",
        "http://h:8000@1": "a",
    }


def test_but_not_if_one_of_them_is_there_twice(write_steps: "WriteSteps", folder: Path) -> None:
    engines(write_steps, a={"dp_rank": 0}, b={"dp_rank": 0})
    with pytest.raises(
        ValidationError, match="no trace fits a rank: the proxy has http://h:8000@0"
    ):
        matched(folder, "http://h:8000@0")


def test_the_operators_word_goes_first(
    write_steps: "WriteSteps", folder: Path, tmp_path: Path
) -> None:
    engines(write_steps, a={"port": 1, "dp_rank": 0}, b={"port": 2, "dp_rank": 0})
    elsewhere = write_steps("c", [5], [10]).rename(tmp_path / "elsewhere")
    names = ("http://h:1", "http://h:2", "http://h:3")
    given = {"http://h:1": Path("b.steps"), "http://h:3": elsewhere}
    assert matched(folder, *names, given=given) == {"http://h:1": "b", "http://h:3": "elsewhere"}
    given = {"http://h:3": folder / "a.steps"}
    assert matched(folder, *names, given=given) == {"http://h:2": "b", "http://h:3": "a"}


def test_words_that_do_not_fit(write_steps: "WriteSteps", folder: Path) -> None:
    engines(write_steps, a={"port": 1})
    with pytest.raises(ValidationError, match="no rank is called 'x', but http://h:1"):
        matched(folder, "http://h:1", given={"x": Path("a.steps")})
    twice = dict.fromkeys(("http://h:1", "http://h:2"), Path("a.steps"))
    with pytest.raises(ValidationError, match="gives one trace to two ranks"):
        matched(folder, *twice, given=twice)
    with pytest.raises(OSError, match="absent"):
        matched(folder, "http://h:1", given={"http://h:1": Path("absent")})


def test_folders_without_a_usable_trace(write_steps: "WriteSteps", folder: Path) -> None:
    with pytest.raises(ValidationError, match="not a directory"):
        read_traces(folder)
    empty = write_steps("empty", [], [])
    with pytest.raises(ValidationError, match="1 step traces, and no step in any"):
        read_traces(folder)
    engines(write_steps, a={})
    assert [trace.path.stem for trace in read_traces(folder)] == ["a"]
    empty.write_text("something else\n")
    with pytest.raises(ValidationError, match=r"empty\.steps: no step trace"):
        read_traces(folder)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ValidationError, match="no step trace"):
        read_traces(folder)
