"""Which trace is which rank's: by port, data-parallel rank and host, or as the operator says."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from balanceroute.engine_patch.reader import STEP_DTYPE, EngineTrace, read_steps
from balanceroute.engine_patch.writer import UNKNOWN
from balanceroute.proxy.lab.validate.traces import (
    ValidationError,
    match,
    read_load_log,
    read_traces,
    timeline_of,
)

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


# Steps as a load over time.


MS = 1_000_000


def trace_of(*steps: tuple[int, int, int]) -> EngineTrace:
    """Return a trace of steps of (start, end, KV tokens), in ms."""
    table = np.zeros(len(steps), STEP_DTYPE)
    for row, (start, end, kv_tokens) in zip(table, steps, strict=True):
        row["start_ns"], row["end_ns"], row["kv_tokens"] = start * MS, end * MS, kv_tokens
    table["wave"] = UNKNOWN
    return EngineTrace(Path("x"), {}, table)


def loads_at(trace: EngineTrace, *times_ms: float) -> list[float]:
    times = (np.array(times_ms) * MS).astype(np.int64)
    return [float(load) for load in timeline_of(trace).loads_at(times)]


def test_a_step_has_its_load_until_it_ends() -> None:
    trace = trace_of((100, 110, 5), (112, 125, 7))
    assert loads_at(trace, 100, 105, 110) == [5, 5, 5]
    # Between two steps the next one's tokens are already there.
    assert loads_at(trace, 111, 112, 125) == [7, 7, 7]


def test_outside_of_the_trace_the_load_is_unknown() -> None:
    assert np.isnan(loads_at(trace_of((100, 110, 5)), 99.9, 110.1)).all()


def test_an_engine_with_nothing_to_do_has_no_load() -> None:
    trace = trace_of((100, 110, 5), (200, 210, 7))
    assert loads_at(trace, 110, 111, 199, 200) == [5, 0, 0, 7]


def test_steps_that_overlap_follow_each_other() -> None:
    # Asynchronous scheduling: the second was scheduled while the first ran.
    timeline = timeline_of(trace_of((100, 120, 5), (102, 140, 6), (122, 160, 7)))
    assert (timeline.begin_ns // MS).tolist() == [100, 120, 140]
    assert (timeline.cycle_ns // MS).tolist() == [20, 20, 20]
    assert timeline.loads_at(np.array([119, 121]) * MS).tolist() == [5, 6]


def test_a_cycle_has_the_engines_own_work_and_not_its_rest() -> None:
    timeline = timeline_of(trace_of((100, 120, 5), (123, 140, 6), (500, 520, 7)))
    assert (timeline.cycle_ns // MS).tolist() == [20, 20, 20]


def test_steps_are_put_in_the_order_of_their_ends() -> None:
    timeline = timeline_of(trace_of((120, 140, 6), (100, 120, 5)))
    assert timeline.kv_tokens.tolist() == [5, 6]


def test_the_place_in_a_barrier_is_the_wave_and_its_step(write_steps: "WriteSteps") -> None:
    inside = write_steps("in", [3, 0], [10, 10], in_barrier=True)
    outside = write_steps("out", [3, 4], [10, 10])
    timeline = timeline_of(read_steps(inside))
    assert timeline.place.tolist() == [0, 1]
    assert timeline.dummy.tolist() == [False, True]
    assert timeline_of(read_steps(outside)).place.tolist() == [-1, -1]


# The reader of the load log: what the proxy writes, and nothing else.


GOOD = b'{"time_s":12.5,"loads":{"http://a:1@0":[10,1,30,2],"http://a:1@1":[0,0,0,0]}}\n'


def test_samples_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "log"
    # The second rank joins later; the clock is set back once; the last line is being written.
    path.write_bytes(
        b'{"time_s":13,"loads":{"http://a:1@0":[11,1,31,2]}}\n' + GOOD + GOOD[: len(GOOD) // 2]
    )
    log = read_load_log(path)
    assert list(log) == ["http://a:1@0", "http://a:1@1"]
    first, second = log.values()
    assert first.times_ns.tolist() == [12_500_000_000, 13_000_000_000]
    assert first.started_tokens.tolist() == [10, 11]
    assert first.bound_tokens.tolist() == [30, 31]
    assert second.times_ns.tolist() == [12_500_000_000]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"time_s":1}\n',
        b'{"time_s":NaN,"loads":{}}\n',
        b'{"time_s":1e300,"loads":{"a":[1,1,1,1]}}\n',
        b'{"time_s":null,"loads":{}}\n',
        b'{"time_s":1,"loads":[]}\n',
        b'{"time_s":1,"loads":{"a":[1,1,1]}}\n',
        b'{"time_s":1,"loads":{"a":[1,1,1,1.5]}}\n',
        b'{"time_s":1,"loads":{"a":[1,1,1,true]}}\n',
        b'{"time_s":1,"loads":{"a":null}}\n',
        b'{"time_s":1,"loads":{"a":[99999999999999999999,1,1,1]}}\n',
        b'{"arrival_s":1,"prompt_tokens":3}\n',
    ],
)
def test_a_line_that_is_no_sample_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(GOOD + line)
    with pytest.raises(ValidationError) as caught:
        read_load_log(path)
    assert str(caught.value) == f"{path}:2: no sample of a load log"


@pytest.mark.parametrize("text", [b"", GOOD[:-1], b'{"time_s":1,"loads":{}}\n'])
def test_a_log_without_samples_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    with pytest.raises(ValidationError, match="a load log without samples"):
        read_load_log(path)
