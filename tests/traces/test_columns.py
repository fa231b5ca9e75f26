"""Columns named by the user, and headers in another case."""

import re
from pathlib import Path

import pytest

from balanceroute.traces import TraceError, TraceRequest, detect_format, read_names, read_trace

NAMES = read_names("arrival=time, prompt=input_tokens,output=output_tokens")
LIMITED = read_names("output=out,limit=cap,prompt=in,arrival=at")


@pytest.mark.parametrize(
    "text",
    [
        "input_tokens,TIME,x,output_tokens\n7,10.5,a,3\n8,10.25,b,4\n",
        "input_tokens;TIME;x;output_tokens\n7;10.5;a, b;3\n8;10.25;b;4\n",
        'input_tokens\tTIME\tx\toutput_tokens\n7\t10.5\t"a\tb"\t3\n8\t10.25\tb\t4\n',
        '{"time": 10.5, "input_tokens": 7, "output_tokens": 3}\n'
        '{"output_tokens": 4, "input_tokens": 8, "time": 10.25}\n',
        "time,input_tokens,output_tokens\n2024-05-10 00:00:00.5,7,3\n2024-05-10 00:00:00.25,8,4\n",
        '{"time": "2024-05-10 00:00:00.5", "input_tokens": 7, "output_tokens": 3}\n'
        '{"time": "2024-05-10T00:00:00.25Z", "input_tokens": 8, "output_tokens": 4}\n',
    ],
    ids=["csv", "semicolons", "tabs", "jsonl", "csv with dates", "jsonl with dates"],
)
def test_a_trace_of_ones_own_is_read_by_the_names_of_its_columns(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    read = read_trace(path, columns=NAMES)
    assert read == [TraceRequest(0, 8, 4), TraceRequest(250_000_000, 7, 3)]


@pytest.mark.parametrize(
    "text",
    [
        "at,in,out,cap\n0,5,6,\n1,5,6,256\n",
        '{"at": 0, "in": 5, "out": 6, "cap": null}\n{"at": 1, "in": 5, "out": 6, "cap": 256}\n',
    ],
)
def test_limits_may_be_named_and_may_be_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    limits = [request.max_tokens for request in read_trace(path, columns=LIMITED)]
    assert limits == [None, 256]


@pytest.mark.parametrize(
    "text",
    [
        "at,in,out,who,kind,due\n0,5,6,,,\n1,5,6,a,-2,0.5\n",
        '{"at": 0, "in": 5, "out": 6, "who": null, "kind": null, "due": null}\n'
        '{"at": 1, "in": 5, "out": 6, "who": "a", "kind": -2, "due": 0.5}\n',
    ],
)
def test_tenant_class_and_deadline_may_be_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    names = read_names("arrival=at,prompt=in,output=out,tenant=who,class=kind,deadline=due")
    assert read_trace(path, columns=names) == [
        TraceRequest(0, 5, 6),
        TraceRequest(10**9, 5, 6, tenant="a", level=-2, deadline_ns=5 * 10**8),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("time,input_tokens\n1,2\n", ":1: missing column 'output_tokens'"),
        ("time,input_tokens,output_tokens\nnoon,2,3\n", ":2: time is not a finite number: 'noon'"),
        ("time,input_tokens,output_tokens\n24:00,2,3\n", ":2: TIMESTAMP is not a date and time"),
        ("time,input_tokens,output_tokens\n1,2,many\n", ":2: output_tokens is not an integer"),
        ('{"time": 1, "input_tokens": 2}\n', ":1: missing key 'output_tokens'"),
        ('{"time": null, "input_tokens": 2, "output_tokens": 3}\n', ":1: time is not a finite"),
    ],
)
def test_faults_name_the_file_s_own_words(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    with pytest.raises(TraceError) as fault:
        read_trace(path, columns=NAMES)
    assert f"{path}{reason}" in str(fault.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("arrival=a,prompt=b", "output is missing"),
        ("arrival=a,prompt=b,output", "output needs one column"),
        ("arrival=a,prompt=b,output=", "output needs one column"),
        ("arrival=a,prompt=b,output=c,output=d", "output needs one column"),
        ("when=a,prompt=b,output=c", "'when' is none of arrival, prompt, output, limit"),
        ("", "'' is none of"),
    ],
)
def test_names_that_make_no_sense_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_names(text)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("timestamp,contexttokens,generatedtokens", "azure"),
        ("TIMESTAMP,CONTEXTTOKENS,GENERATEDTOKENS", "azure"),
        ("timestamp,Request Tokens,response tokens", "burstgpt"),
    ],
)
def test_the_case_of_a_header_does_not_matter(header: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "lower.csv"
    time = "2023-11-16 18:17:03.5" if name == "azure" else "3.5"
    path.write_text(f"{header}\n{time},12,3\n")
    assert detect_format(path) == name
    assert read_trace(path) == [TraceRequest(0, 12, 3)]


def test_an_unknown_format_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("when;what\n")
    with pytest.raises(TraceError, match="known: azure, bailian, mooncake, burstgpt, jsonl"):
        read_trace(path)


def test_a_fault_of_the_file_as_a_whole_has_no_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as fault:
        read_trace(tmp_path / "absent.csv")
    assert str(fault.value) == f"{tmp_path / 'absent.csv'}: No such file or directory"


@pytest.mark.parametrize(
    "text",
    [
        "time,input_tokens,output_tokens\n0,7.0,3.0\n1,8.0,\n2,,\n3,,0\n",
        '{"time": 0, "input_tokens": 7.0, "output_tokens": 3.0}\n'
        '{"time": 1, "input_tokens": 8.0, "output_tokens": null}\n'
        '{"time": 2, "input_tokens": null, "output_tokens": null}\n'
        '{"time": 3, "input_tokens": null, "output_tokens": 0}\n',
    ],
    ids=["csv", "jsonl"],
)
def test_a_request_that_failed_has_no_output(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    read = [(one.prompt_tokens, one.output_tokens) for one in read_trace(path, columns=NAMES)]
    assert read == [(7, 3), (8, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("time,input_tokens,output_tokens\n0,,5\n", "input_tokens is not an integer: ''"),
        ("time,input_tokens,output_tokens\n,7,5\n", "time is not a finite number: ''"),
        ("0.5,7,3\n1.5,7,3\n", "no header, but '0.5,7,3': write the names of the columns above it"),
        (
            "time,input_tokens,output_tokens\n1700000000123,7,3\n",
            "as seconds; if it is in milliseconds since 1970, divide it by 1,000",
        ),
        (
            '{"time": 1700000000123, "input_tokens": 7, "output_tokens": 3}\n',
            "as seconds; if it is in milliseconds since 1970, divide it by 1,000",
        ),
    ],
)
def test_what_cannot_be_read_is_told_with_its_cure(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(reason)):
        read_trace(path, columns=NAMES)
