"""The same request to a real vLLM 0.32 and to an emulated engine: the same form of answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.lab.emulate.lab import Lab, emulated
from tests.support.site import Exchanged

from balanceroute.proxy.lab.emulate import DpMode
from balanceroute.proxy.lab.emulate.engine_metrics import (
    EmulatedRankState,
    RankCounters,
    render_metrics,
)
from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder

TRANSCRIPTS = Path(__file__).parent / "transcripts"
# Strings and numbers that are part of the protocol; all others depend on the model or the moment.
LITERAL = {
    "object", "finish_reason", "stop_reason", "role", "type", "owned_by", "organization", "model",
    "transfer_mode", "index", "tp_size", "dcp_size", "pp_size", "version", "server_load", "parent",
    "max_model_len", "remote_host", "remote_port", "code", "message", "param", "status", "phase",
}  # fmt: skip
FRAMING = {"content-length", "transfer-encoding", "connection"}


@dataclass(frozen=True)
class Transcript:
    """A recorded exchange."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int
    answer_headers: list[tuple[str, str]]
    answer: bytes

    @property
    def values(self) -> dict[str, Any]:
        values = json.loads(self.body)
        assert isinstance(values, dict)
        return values


def read(name: str) -> Transcript:
    head, _, body = (TRANSCRIPTS / f"{name}.req").read_bytes().partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    method, path, _ = line.split()
    sent = dict(field.split(": ", 1) for field in fields)
    headers = {key: value for key, value in sent.items() if key.lower().startswith("x-")}
    head, _, answer = (TRANSCRIPTS / f"{name}.resp").read_bytes().partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    got = [(field.split(": ", 1)[0], field.split(": ", 1)[1]) for field in fields]
    if ("transfer-encoding", "chunked") in got:
        answer = bytes(ChunkedDecoder().feed(answer))
    return Transcript(method, path, headers, body, int(line.split()[1]), got, answer)


def shape(value: object, key: str = "") -> object:
    """Return a JSON value without what depends on the model or the moment; order of keys counts."""
    match value:
        case dict() if key == "top_logprobs" and "token" not in value:
            return "numbers by token"
        case dict():
            return [(name, shape(one, name)) for name, one in value.items()]
        case list() if key == "bytes":
            return "bytes"  # Possibly none: the recorded model spoke in parts of characters.
        case list():
            return collapsed([shape(one, key) for one in value])
        case bool() | None:
            return value
        case str() | int() | float():
            if key in LITERAL:
                return value
            return "number" if isinstance(value, int | float) else "string"
        case _:
            raise AssertionError(value)


def collapsed(shapes: list[object]) -> list[object]:
    """Return shapes without those that repeat the one before."""
    return [one for i, one in enumerate(shapes) if i == 0 or one != shapes[i - 1]]


def events_of(body: bytes) -> list[object]:
    """Return the shape of a stream's events; each must be compact JSON behind `data: `."""
    shapes: list[object] = []
    assert body.endswith(b"\n\n")
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        name, _, text = event.rpartition("data: ")
        assert name in ("", f"event: {json.loads(text)['type']}\n" if name else "")
        if text == "[DONE]":
            shapes.append(text)
            continue
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        shapes.append(shape(json.loads(text)))
    return shapes


def assert_same_head(answer: Exchanged, recorded: Transcript) -> None:
    got = [(name.decode(), value.decode()) for name, value in answer.headers]
    kept = [(name, "" if name == "date" else value) for name, value in got if name not in FRAMING]
    wanted = [
        (name, "" if name == "date" else value)
        for name, value in recorded.answer_headers
        if name not in FRAMING
    ]
    assert answer.status == recorded.status
    assert sorted(kept) == sorted(wanted)


def assert_same_json(answer: Exchanged, recorded: Transcript) -> None:
    assert_same_head(answer, recorded)
    text = answer.body.decode()
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    assert shape(answer.json) == shape(json.loads(recorded.answer))


async def repeat(lab: Lab, recorded: Transcript, engine: str = "decode/0") -> Exchanged:
    """Send a recorded request to an engine."""
    answer = lab.send(
        engine, recorded.path, recorded.body, method=recorded.method, headers=recorded.headers
    )
    await answer.end()
    return answer


def recordings(
    groups: Sequence[tuple[str, str, dict[str, object]]],
) -> list[tuple[str, dict[str, object]]]:
    """Return the name and the settings of each recording; a group has a prefix and names."""
    return [
        (prefix + name, settings) for prefix, names, settings in groups for name in names.split()
    ]


AGENTS: dict[str, object] = {"max_model_len": 2048}
DETAILS: dict[str, object] = {"prompt_tokens_details": True}
AGENT: dict[str, object] = AGENTS | {"ranks": 1}


@pytest.mark.parametrize(
    ("name", "settings"),
    recordings(
        [
            ("solo_", "chat cmpl cmpl_tokenids_prompt tokenize_chat tokenize_prompt models", {}),
            ("", "solo_version solo_load dp_rank_x", {}),
            ("agents_", "msg msg_system msg_items resp resp_logprobs resp_items resp_ids", AGENTS),
            ("solo_", "generate generate_logprobs", DETAILS),
        ]
    ),
)
@emulated("**settings")
async def test_an_answer_has_the_recorded_form(
    lab: Lab, name: str, settings: dict[str, object]
) -> None:
    del settings
    recorded = read(name)
    engine = "prefill/0" if name == "dp_rank_x" else "decode/0"
    assert_same_json(await repeat(lab, recorded, engine), recorded)


@pytest.mark.parametrize(
    ("name", "settings"),
    recordings(
        [
            ("solo_chat_", "stream stream_usage stream_usage_continuous stream_logprobs", {}),
            (
                "solo_",
                "chat_stream_tokenids cmpl_stream cmpl_stream_usage cmpl_stream_logprobs",
                {},
            ),
            ("solo_", "generate_stream generate_text_each", DETAILS),
            ("solo_", "generate_text_logprobs_stream", DETAILS),
        ]
    ),
)
@emulated("**settings")
async def test_a_stream_has_the_recorded_events(
    lab: Lab, name: str, settings: dict[str, object]
) -> None:
    recorded = read(name)
    answer = await repeat(lab, recorded)
    assert_same_head(answer, recorded)
    assert collapsed(events_of(answer.body)) == collapsed(events_of(recorded.answer))
    if not settings:
        # One event a token, which is what the recorded engine did here too.
        assert len(answer.texts()) == 8


# What is left of the answer's limit is a matter of the words: the last event of a response, the one before
# the end of a message, and both where thoughts come before.
@pytest.mark.parametrize(
    ("name", "settings", "left_out"),
    [
        *((f"msg_{name}stream", {}, slice(-2, -1)) for name in ("", "tool_")),
        *(
            (f"resp_{name}stream", {}, slice(-1, None))
            for name in ("", "logprobs_", "tool_", "custom_", "format_")
        ),
        *(
            (f"{api}_think_stream", {"reasoning_parser": True}, slice(-2, None))
            for api in ("msg", "resp")
        ),
    ],
)
@emulated("**settings", max_model_len=2048)
async def test_an_agents_stream_has_the_recorded_events(
    lab: Lab, name: str, settings: dict[str, object], left_out: slice
) -> None:
    del settings
    recorded = read(f"agents_{name}")
    answer = await repeat(lab, recorded)
    assert_same_head(answer, recorded)
    got, wanted = (collapsed(events_of(one)) for one in (answer.body, recorded.answer))
    for one in (got, wanted):
        del one[left_out]
    assert got == wanted


@pytest.mark.parametrize(
    "name", ["solo_chat_stream_n2", "solo_cmpl_stream_n2", "solo_cmpl_batch_stream"]
)
@emulated()
async def test_a_stream_of_several_choices_has_the_recorded_events(lab: Lab, name: str) -> None:
    recorded = read(name)
    answer = await repeat(lab, recorded)
    assert_same_head(answer, recorded)
    got, wanted = events_of(answer.body), events_of(recorded.answer)
    assert [one for one in got if one not in wanted] == []
    assert [one for one in wanted if one not in got] == []
    openings = 2 if "chat" in name else 0
    assert got[:openings] == wanted[:openings]
    assert got[-1] == wanted[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("name", "settings"),
    recordings(
        [
            ("solo_", "cmpl_max_tokens_zero health", {}),
            ("solo_err_", "404 405 badjson max_tokens_neg no_messages prompt_plus_max", {}),
            ("solo_err_", "stream_options_no_stream unknown_model", {}),
            ("nixl_", "pd_kv_params_not_a_dict chat_stream_n2_ref", {}),
            ("nixl_pd_", "wrong_engine_id prefiller_dead_nonstream", {"dp_mode": DpMode.PORTS}),
            ("dp_rank_", "7 -1", {}),
            ("agents_msg_err_", "budget zero messages model temp budget_small long", AGENT),
            ("agents_msg_", "ids", AGENT),
            ("agents_resp_err_", "zero previous background prompt grammar required named", AGENT),
            ("agents_resp_err_", "hosted long encrypted item empty model temp", AGENT),
            ("agents_resp_err_", "background_nostore", AGENT),
        ]
    ),
)
@emulated("**settings", dp_mode=DpMode.HEADER)
async def test_an_error_is_the_recorded_one_byte_for_byte(
    lab: Lab, name: str, settings: dict[str, object]
) -> None:
    del settings
    recorded = read(name)
    answer = await repeat(lab, recorded)
    assert_same_head(answer, recorded)
    assert answer.body == recorded.answer


@emulated()
async def test_a_prompt_past_the_context_is_refused_in_the_recorded_words(lab: Lab) -> None:
    answer = await lab.post("decode/0", "/v1/completions", {"prompt": "a b c d " * 3000})
    assert answer.status == 400
    assert answer.body.decode() == (
        '{"error":{"message":"This model\'s maximum context length is 1024 tokens. However, your '
        "prompt contains at least 1025 input tokens, which exceeds this limit even without any "
        "output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, "
        'value=1025)","type":"BadRequestError","param":"input_tokens","code":400}}'
    )


@pytest.mark.parametrize(
    "name",
    [
        "nixl_chat_nonstream_prefill",
        "nixl_chat_stream_logprobs_prefill",
        "nixl_cmpl_nonstream_prefill",
        "nixl_cmpl_stream_logprobs_prefill",
    ],
)
@emulated()
async def test_a_nixl_prefill_answers_in_the_recorded_form(lab: Lab, name: str) -> None:
    recorded = read(name)
    answer = await repeat(lab, recorded, "prefill/0")
    assert_same_json(answer, recorded)
    values = answer.json
    assert values["id"] == json.loads(recorded.answer)["id"]  # From X-Request-Id.
    params = values["kv_transfer_params"]
    # The id inside the engine: of a completion with the prompt's number, then random digits.
    internal, _, digits = params["remote_request_id"].rpartition("-")
    assert internal == values["id"] + ("-0" if "cmpl_" in name else "")
    assert len(digits) == 8
    assert params["remote_num_tokens"] == values["usage"]["prompt_tokens"]
    blocks = -(-params["remote_num_tokens"] // 32)
    assert params["remote_block_ids"] == [list(range(1, blocks + 1))]


@emulated(connector="mooncake")
async def test_a_mooncake_prefill_answers_in_the_recorded_form(lab: Lab) -> None:
    recorded = read("mooncake_chat_nonstream_prefill")
    assert_same_json(await repeat(lab, recorded, "prefill/0"), recorded)
    query = read("mooncake_bootstrap_query")
    (url,) = lab.fleet.bootstrap_urls
    assert_same_json(await lab.get_url(f"{url}/query"), query)


@pytest.mark.parametrize("name", ["nixl_chat_nonstream_decode", "nixl_chat_stream_logprobs_decode"])
@emulated()
async def test_a_decode_answers_in_the_recorded_form(lab: Lab, name: str) -> None:
    recorded = read(name)
    values = recorded.values
    del values["kv_transfer_params"]
    answer = await lab.post(
        "decode/0", recorded.path, await lab.prefilled(recorded.path, values), recorded.headers
    )
    if not values.get("stream"):
        assert_same_json(answer, recorded)
        assert answer.json["id"] == json.loads(recorded.answer)["id"]
        return
    assert_same_head(answer, recorded)
    # The recorded model spoke in halves of characters: its last token has no text.
    got = events_of(answer.body)
    wanted = events_of(recorded.answer)
    assert collapsed(got)[:2] == collapsed(wanted)[:2]
    assert got[-1] == wanted[-1]


@pytest.mark.parametrize("name", ["msg_prefill", "resp_prefill"])
@emulated()
async def test_an_agents_prefill_answers_in_the_recorded_form(lab: Lab, name: str) -> None:
    recorded = read(f"agents_{name}")
    answer = await repeat(lab, recorded, "prefill/0")
    assert_same_head(answer, recorded)
    shapes = []
    for values in (answer.json, json.loads(recorded.answer)):
        del values["kv_transfer_params"]["remote_port"]
        shapes.append(shape(values))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["msg_failed_pull_stream", "resp_failed_pull_stream"])
@emulated()
async def test_an_agents_stream_fails_as_recorded(lab: Lab, name: str) -> None:
    recorded = read(f"agents_{name}")
    answer = await repeat(lab, recorded)
    assert_same_head(answer, recorded)
    assert events_of(answer.body) == events_of(recorded.answer)
    assert (answer.error is None) == name.startswith("msg")


@emulated(partial_utf8=0.2, merged_outputs=0.2)
async def test_halves_of_characters_and_a_late_server_show_as_recorded(lab: Lab) -> None:
    recorded = read("nixl_chat_stream_logprobs_decode")
    values = recorded.values
    del values["kv_transfer_params"]
    got = events_of((await lab.post("decode/0", recorded.path, values)).body)
    # The recorded answer ends with half a character; an emulated one says what it has.
    wanted = events_of(recorded.answer)[:-2]
    assert len(wanted) < 2 + values["max_tokens"]
    assert [one for one in wanted if one not in got] == []


@emulated()
async def test_a_tool_call_cut_short_streams_as_recorded(lab: Lab) -> None:
    recorded = read("chat_tools_named_stream")
    values = recorded.values
    properties = {name: {"type": "string"} for name in ("city", "country", "unit")}
    values["tools"][0]["function"]["parameters"]["properties"] = properties
    values["max_tokens"] = 7
    answer = await lab.post("decode/0", recorded.path, values)
    assert_same_head(answer, recorded)
    assert collapsed(events_of(answer.body)) == collapsed(events_of(recorded.answer))


@emulated()
async def test_an_answer_without_a_tool_call_has_the_recorded_form(lab: Lab) -> None:
    recorded = read("chat_tools_auto_nonstream")
    values = recorded.values | {"ignore_eos": True}
    for number in range(20):  # The prompt decides whether a tool is called.
        values["messages"] = [{"role": "user", "content": f"weather in city {number}"}]
        answer = await lab.post("decode/0", recorded.path, values)
        if answer.json["choices"][0]["message"]["content"] is not None:
            assert_same_json(answer, recorded)
            return
    raise AssertionError("every prompt called the tool")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(999_999, "999999.0"), (1_000_000, "1e+06"), (1_234_567, "1.234567e+06")],
)
def test_a_large_number_of_metrics_is_written_as_go_does(tokens: int, text: str) -> None:
    state = EmulatedRankState(0, 0, 0, 0, 0.0, RankCounters(prompt_tokens=tokens))
    page = render_metrics("m", [state], block_tokens=16, kv_tokens=None).decode()
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {text}' in page.splitlines()


@emulated(dp_size=2)
async def test_metrics_have_the_recorded_names_and_labels(lab: Lab) -> None:
    page = (await lab.get("decode/1", "/metrics")).body.decode()
    for line in (
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0',
        'vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0',
        'vllm:num_requests_waiting_by_reason{engine="1",model_name="tiny",reason="deferred"} 0.0',
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{engine="1",model_name="tiny"} 0.0',
        'vllm:generation_tokens_total{engine="1",model_name="tiny"} 0.0',
        'vllm:request_success_total{engine="1",finished_reason="stop",model_name="tiny"} 0.0',
        'vllm:num_preemptions_total{engine="1",model_name="tiny"} 0.0',
    ):
        assert line in page.splitlines()
