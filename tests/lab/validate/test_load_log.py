"""The reader of the load log: what the proxy writes, and nothing else."""

from pathlib import Path

import pytest

from balanceroute.proxy.lab.validate.traces import ValidationError, read_load_log

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
