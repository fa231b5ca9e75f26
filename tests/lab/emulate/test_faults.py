"""Faults on request: each one as a client sees it, and what it holds meanwhile."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, LONG_S, Lab, emulated, play
from tests.support.site import Exchanged

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.faults import AfterPull, ErrorForm, Faults, MalformedStream
from balanceroute.proxy.live.openai.errors import read_error
from balanceroute.proxy.wire.messages import WireFault
from balanceroute.proxy.wire.sse import event_data

VALUES: dict[str, Any] = {"prompt": "t1 t2", "max_tokens": 6, "ignore_eos": True}
STREAM = VALUES | {"stream": True}


def kind(exchanged: Exchanged) -> WireFault:
    assert exchanged.error is not None
    return exchanged.error.kind


@pytest.mark.parametrize("status", [400, 413, 429, 500, 503])
@emulated()
async def test_a_status_fault_is_an_error_with_that_status(lab: Lab, status: int) -> None:
    lab.fleet.faults.set("decode/0", **{f"status_{status}": 1.0, "retry_after_s": 7})
    answer = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert answer.status == status
    assert answer.json["error"]["code"] == status
    retry_after = answer.header(b"retry-after")
    assert retry_after == (b"7" if status in (429, 503) else None)
    assert (await lab.post("decode/1", COMPLETIONS, VALUES)).status == 200
    assert (await lab.get("decode/0", "/health")).status == 200
    lab.fleet.faults.clear()
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200


@emulated()
async def test_a_probability_is_drawn_for_each_request(lab: Lab) -> None:
    lab.fleet.faults.set("decode", status_500=0.3)
    values = VALUES | {"max_tokens": 1}
    answers = [await lab.post("decode/0", COMPLETIONS, values) for _ in range(60)]
    failed = sum(answer.status == 500 for answer in answers)
    assert 8 <= failed <= 28


@pytest.mark.parametrize("values", [VALUES, STREAM], ids=["whole", "stream"])
@emulated()
async def test_a_reset_before_the_headers(lab: Lab, values: dict[str, Any]) -> None:
    lab.fleet.faults.set("decode/0", reset_before_headers=1.0)
    answer = await lab.post("decode/0", COMPLETIONS, values)
    assert (kind(answer), answer.status) == (WireFault.RESET, 0)
    assert lab.fleet.idle


@pytest.mark.parametrize("tokens", [0, 1, 5])
@emulated()
async def test_a_reset_after_some_tokens(lab: Lab, tokens: int) -> None:
    lab.fleet.faults.set("decode/0", reset_after_tokens=tokens)
    answer = await lab.post("decode/0", COMPLETIONS, STREAM)
    assert (kind(answer), answer.status) == (WireFault.RESET, 200)
    assert len(answer.texts()) == tokens
    assert not answer.done
    assert lab.fleet.idle
    whole = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert (kind(whole), whole.status) == (WireFault.RESET, 0)


@pytest.mark.parametrize("tokens", [0, 3])
@emulated()
async def test_a_stream_that_ends_without_a_reason(lab: Lab, tokens: int) -> None:
    lab.fleet.faults.set("decode/0", end_after_tokens=tokens)
    answer = await lab.post("decode/0", COMPLETIONS, STREAM)
    assert answer.error is None
    assert len(answer.texts()) == tokens
    assert not answer.done
    assert lab.fleet.idle


@pytest.mark.parametrize("tokens", [0, 3])
@emulated()
async def test_a_stalled_stream_keeps_its_slot_until_the_client_leaves(
    lab: Lab, tokens: int
) -> None:
    lab.fleet.faults.set("decode/0", stall_after_tokens=tokens)
    exchanged = lab.send("decode/0", COMPLETIONS, STREAM | {"max_tokens": 900})
    await asyncio.sleep(10.0)
    assert len(exchanged.texts()) == tokens
    assert not exchanged.over
    assert lab.fleet.stats()["running"] == [1, 0]
    exchanged.call.abort()
    await asyncio.sleep(0.01)
    assert lab.fleet.stats()["running"] == [0, 0]
    assert lab.fleet.idle


@pytest.mark.parametrize("tokens", [0, 3])
@emulated()
async def test_an_engine_error_within_a_stream(lab: Lab, tokens: int) -> None:
    lab.fleet.faults.set("decode/0", error_event_after_tokens=tokens)
    answer = await lab.post("decode/0", CHAT, STREAM | {"messages": [{"role": "user"}]})
    assert len([text for text in answer.texts() if text]) == tokens
    assert event_data(answer.events[-2]).startswith(b'{"error": {"message": "Internal')
    assert answer.done
    whole = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert whole.status == 500
    assert lab.fleet.idle


@emulated()
async def test_an_answer_handed_back_on_request(lab: Lab) -> None:
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=2)
    options = {"stream_options": {"include_usage": True}}
    stream = await lab.post("decode/0", COMPLETIONS, STREAM | options)
    assert stream.reasons() == ("stop", "recomputed")
    assert stream.chunks[-1]["usage"]["completion_tokens"] == 2
    whole = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert whole.reasons() == ("stop", "recomputed")
    assert whole.text == stream.text
    assert lab.fleet.idle


@emulated()
async def test_a_hanging_engine_answers_nothing_but_its_health(lab: Lab) -> None:
    lab.fleet.faults.set("prefill/0", hang=True)
    exchanged = lab.send("prefill/0", COMPLETIONS, VALUES)
    await asyncio.sleep(LONG_S)
    assert not exchanged.status
    assert not lab.fleet.idle
    assert (await lab.get("prefill/0", "/health")).status == 200
    exchanged.call.abort()
    await asyncio.sleep(0.01)
    assert lab.fleet.idle


@emulated()
async def test_a_delay_comes_before_the_service(lab: Lab) -> None:
    lab.fleet.faults.set("prefill/0", delay_s=5.0)
    begin_s = lab.loop.time()
    await lab.prefill(COMPLETIONS, VALUES)
    assert lab.loop.time() - begin_s == pytest.approx(5.02, abs=0.01)
    gone = lab.send("prefill/0", COMPLETIONS, VALUES)
    await asyncio.sleep(1.0)
    gone.call.abort()
    await asyncio.sleep(10.0)
    assert lab.leases() == {"held": 1}  # Nothing was computed for who left.


@emulated()
async def test_a_refusing_engine_finishes_what_it_began(lab: Lab) -> None:
    under_way = lab.send("decode/0", COMPLETIONS, STREAM)
    await under_way.tokens(1)
    lab.fleet.faults.set("decode/0", refuse=True)
    refused = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert kind(refused) is WireFault.CONNECT
    await under_way.end()
    assert under_way.done
    lab.fleet.faults.set("decode/0", refuse=False)
    await asyncio.sleep(0.01)
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200


@emulated()
async def test_a_first_token_that_ends_the_text(lab: Lab) -> None:
    lab.fleet.faults.set("all", eos_first=1.0)
    probe = await lab.prefill(CHAT, {"messages": [{"role": "user", "content": "a"}]})
    assert probe.reasons() == ("stop", None)
    assert probe.json["kv_transfer_params"] is None
    assert probe.json["usage"]["completion_tokens"] == 1
    assert probe.text == ""
    stream = await lab.post("decode/0", COMPLETIONS, STREAM)
    assert stream.texts() == [""]
    assert stream.reasons() == ("stop", None)


@emulated()
async def test_transfer_parameters_that_are_missing_or_somebody_elses(lab: Lab) -> None:
    lab.fleet.faults.set("prefill/0", drop_kv_params=1.0, lease_s=2.0)
    answer = await lab.prefill(COMPLETIONS, VALUES)
    assert answer.json["kv_transfer_params"] is None
    assert lab.leases() == {"held": 1}
    await asyncio.sleep(2.1)
    assert lab.leases() == {"expired": 1}
    lab.fleet.faults.set("prefill/0", drop_kv_params=0.0, alien_kv_params=1.0)
    params = (await lab.prefill(COMPLETIONS, VALUES)).json["kv_transfer_params"]
    assert params["remote_host"] == "169.254.169.254"
    assert list(params)[:3] == ["do_remote_prefill", "do_remote_decode", "remote_block_ids"]


@pytest.mark.parametrize("malformed", list(MalformedStream))
@emulated()
async def test_a_malformed_stream_is_what_it_is_called(
    lab: Lab, malformed: MalformedStream
) -> None:
    right = await lab.post("decode/1", COMPLETIONS, STREAM)
    lab.fleet.faults.set("decode/0", malformed=malformed.value)
    wrong = await lab.post("decode/0", COMPLETIONS, STREAM)
    assert wrong.error is None
    data = [event_data(event) for event in wrong.events]
    match malformed:
        case MalformedStream.BAD_JSON:
            with pytest.raises(json.JSONDecodeError):
                json.loads(data[0])
        case MalformedStream.NUL:
            assert b"\0" in data[0]
        case MalformedStream.NO_DATA:
            assert wrong.body.startswith(b'{"id"')
        case MalformedStream.CRLF | MalformedStream.CR | MalformedStream.MIXED_ENDS:
            assert wrong.text == right.text
            assert b"\r" in wrong.body
        case MalformedStream.BYTES | MalformedStream.JOINED:
            assert wrong.text == right.text
            times_s = set(wrong.times_s)
            assert (len(times_s) == 1) == (malformed is MalformedStream.JOINED)
        case MalformedStream.BOM:
            assert wrong.body.startswith(b"\xef\xbb\xbfdata: ")
        case MalformedStream.COMMENTS | MalformedStream.FIELDS:
            assert wrong.text == right.text
            assert wrong.body.startswith((b": ping", b"event: message\nid: 7\nretry: 1000\n"))
        case MalformedStream.HUGE:
            assert len(wrong.events[0]) > 20 << 20
        case MalformedStream.USAGE_FIRST:
            options = {"include_usage": True, "continuous_usage_stats": True}
            told = await lab.post("decode/0", COMPLETIONS, STREAM | {"stream_options": options})
            assert told.text == right.text
            for one in [event_data(event) for event in told.events][:-1]:
                names = list(json.loads(one))
                assert names.index("usage") == names.index("choices") - 1
        case MalformedStream.NO_LAST_BLANK:
            assert wrong.body.endswith(b"\n\ndata: [DONE]")


@pytest.mark.parametrize("form", [None, *ErrorForm])
@pytest.mark.parametrize("in_200", [True, False])
@emulated()
async def test_errors_are_worded_as_asked(
    lab: Lab, form: ErrorForm | None, *, in_200: bool
) -> None:
    word = None if form is None else form.value
    lab.fleet.faults.set("decode/0", error_form=word, errors_in_200=in_200)
    whole = await lab.post("decode/0", COMPLETIONS, VALUES | {"max_tokens": 0})
    stream = await lab.post("decode/0", COMPLETIONS, STREAM | {"max_tokens": 0})
    assert (whole.status, stream.status) == ((200, 200) if in_200 else (400, 400))
    error = read_error(whole.json)
    assert error is not None
    assert error.status == 400
    if in_200:
        assert json.loads(event_data(stream.events[0])) == whole.json
        assert event_data(stream.events[1]) == b"[DONE]"
    lab.fleet.faults.set("decode/0", error_event_after_tokens=1)
    failed = read_error(json.loads(event_data((await late(lab)).events[1])))
    assert failed is not None
    assert failed.status == 500


async def late(lab: Lab) -> Exchanged:
    """Return a stream that fails behind its first token."""
    return await lab.post("decode/0", COMPLETIONS, STREAM)


@pytest.mark.parametrize("malformed", ["not_json", "cut_json", "truncated", "gzip", "trickle"])
@emulated()
async def test_a_malformed_answer_is_what_it_is_called(lab: Lab, malformed: str) -> None:
    lab.fleet.faults.set("prefill/0", malformed_answer=malformed, trickle_s=0.5)
    begin_s = lab.loop.time()
    answer = await lab.prefill(COMPLETIONS, VALUES)
    assert answer.status == 200
    match malformed:
        case "gzip":
            assert answer.header(b"content-encoding") == b"gzip"
            assert json.loads(gzip.decompress(answer.body))["object"] == "text_completion"
        case "trickle":
            assert answer.json["object"] == "text_completion"
            assert lab.loop.time() - begin_s > 0.5 * (len(answer.body) - 1)
        case "truncated":
            assert kind(answer) is WireFault.RESET
        case _:
            assert answer.error is None
            with pytest.raises(json.JSONDecodeError):
                json.loads(answer.body)


@pytest.mark.parametrize(
    ("malformed", "sample"),
    [
        ("nan", "NaN"),
        ("negative", "-17.0"),
        ("infinite", "+Inf"),
        ("idle", "0.0"),
        ("garbage", None),
        ("empty", None),
        ("status_500", None),
        ("huge", "1.0"),
    ],
)
@emulated()
async def test_a_malformed_scrape_is_what_it_is_called(
    lab: Lab, malformed: str, sample: str | None
) -> None:
    exchanged = lab.send("decode/0", COMPLETIONS, STREAM)
    await exchanged.tokens(1)
    lab.fleet.faults.set("decode/0", malformed_scrape=malformed)
    answer = await lab.get("decode/0", "/metrics")
    assert answer.status == (500 if malformed == "status_500" else 200)
    name = b'vllm:num_requests_running{engine="0",model_name="tiny"} '
    found = [line for line in answer.body.splitlines() if line.startswith(name)]
    assert found == ([] if sample is None else [name + sample.encode()])
    assert len(answer.body) > (20 << 20) or malformed != "huge"
    await exchanged.end()


@emulated()
async def test_a_slow_scrape_and_bad_health_do_not_touch_requests(lab: Lab) -> None:
    lab.fleet.faults.set("decode/0", slow_scrape_s=9.0, unhealthy=True)
    begin_s = lab.loop.time()
    assert (await lab.get("decode/0", "/health")).status == 503
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200
    assert lab.loop.time() - begin_s < 1.0
    assert (await lab.get("decode/0", "/metrics")).status == 200
    assert lab.loop.time() - begin_s > 9.0


def test_the_same_seed_fails_the_same_requests() -> None:
    seen: list[list[int]] = []

    async def scenario(lab: Lab) -> None:
        lab.fleet.faults.set("all", status_503=0.5)
        values = VALUES | {"max_tokens": 1}
        seen.append([(await lab.post("decode/0", COMPLETIONS, values)).status for _ in range(20)])

    play(scenario)
    play(scenario)
    assert seen[0] == seen[1]
    assert set(seen[0]) == {200, 503}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status_500": 1.5}, "status_500: Expected `float` <= 1.0"),
        ({"status_500": "often"}, "status_500: Expected `float`, got `str`"),
        ({"hang": 1}, "hang: Expected `bool`, got `int`"),
        ({"reset_after_tokens": 1.5}, "reset_after_tokens: Expected `int | null`, got `float`"),
        ({"reset_after_tokens": -1}, "reset_after_tokens: Expected `int` >= 0"),
        ({"lease_s": 0}, "lease_s: Expected `float` > 0.0"),
        ({"malformed": "badly"}, "malformed: Invalid enum value 'badly'"),
        ({"explode": True}, "Object contains unknown field `explode`"),
    ],
    ids=str,
)
def test_a_fault_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Faults().changed(changes)
    assert str(caught.value).startswith(words)


@emulated()
async def test_unknown_engines_have_no_faults(lab: Lab) -> None:
    for engine in ("decode/9", "router", 17):
        with pytest.raises(ConfigError, match="is unknown"):
            lab.fleet.faults.set(engine, hang=True)
    assert lab.fleet.faults.set(0, hang=True) == ["prefill/0"]
    assert lab.fleet.faults.set("decode", hang=True) == ["decode/0", "decode/1"]
    assert set(lab.fleet.faults.active()) == {"prefill/0", "decode/0", "decode/1"}
    lab.fleet.faults.clear()
    assert not lab.fleet.faults.active()


# What goes wrong between the pull of a KV cache and the first token.


PULLED: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 5,
    "ignore_eos": True,
}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


async def pulled(lab: Lab, fault: AfterPull, *, streamed: bool, after_s: float = 0.0) -> Exchanged:
    """Return what came, some time after a leg that fails so was sent; the blocks are free by then."""
    leg = await lab.prefilled(COMPLETIONS, PULLED)
    lab.fleet.faults.set("decode/0", after_pull=fault, after_pull_s=after_s)
    exchanged = lab.send("decode/0", COMPLETIONS, leg | {"stream": streamed})
    await asyncio.sleep(0.5)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.stats()["held_blocks"] == [0]
    return exchanged


@STREAMED
@emulated()
async def test_a_reset_leaves_an_engine_that_takes_new_connections(
    lab: Lab, streamed: bool
) -> None:
    broken = await pulled(lab, AfterPull.RESET, streamed=streamed)
    assert broken.error is not None
    assert broken.error.kind is WireFault.RESET
    # A stream's head is out before anything is known; another answer has no byte until its end.
    assert (broken.status, broken.body) == (200 if streamed else 0, b"")
    assert lab.fleet.idle
    lab.fleet.faults.clear()
    assert (await lab.post("decode/0", COMPLETIONS, PULLED)).status == 200


@STREAMED
@pytest.mark.parametrize("after_s", [0.0, 30.0])
@emulated()
async def test_an_error_may_come_late(lab: Lab, streamed: bool, after_s: float) -> None:
    failed = await pulled(lab, AfterPull.ERROR, streamed=streamed, after_s=after_s)
    assert failed.over == (after_s == 0.0)
    assert lab.fleet.stats()["arriving"][0] == (after_s > 0.0)
    await failed.end()
    if streamed:
        assert failed.status == 200
        assert failed.chunks[0]["error"]["code"] == 500
    else:
        assert failed.status == 500
    assert lab.fleet.idle


@STREAMED
@emulated()
async def test_the_engine_may_die(lab: Lab, streamed: bool) -> None:
    broken = await pulled(lab, AfterPull.DEATH, streamed=streamed)
    assert broken.error is not None
    refused = await lab.post("decode/0", COMPLETIONS, PULLED)
    assert refused.error is not None
    assert refused.error.kind is WireFault.CONNECT
    assert lab.fleet.idle


@STREAMED
@emulated()
async def test_it_may_be_silent_for_ever(lab: Lab, streamed: bool) -> None:
    silent = await pulled(lab, AfterPull.SILENCE, streamed=streamed)
    await asyncio.sleep(600.0)
    assert not silent.over
    assert silent.body == b""
    silent.call.abort()
    await asyncio.sleep(0.1)
    assert lab.fleet.idle


@emulated()
async def test_what_is_not_pulled_is_not_harmed(lab: Lab) -> None:
    lab.fleet.faults.set("all", after_pull="reset")
    assert (await lab.post("decode/0", COMPLETIONS, PULLED)).status == 200


@pytest.mark.parametrize("value", ["later", 3, True])
def test_only_known_words_say_what_happens(value: object) -> None:
    with pytest.raises(ConfigError, match="after_pull: "):
        Faults().changed({"after_pull": value})


@STREAMED
@emulated(batch_limit=1)
async def test_a_full_batch_holds_requests_that_were_pulled(lab: Lab, streamed: bool) -> None:
    first = lab.send("decode/0", COMPLETIONS, PULLED | {"max_tokens": 900})
    leg = await lab.prefilled(COMPLETIONS, PULLED)
    held = lab.send("decode/0", COMPLETIONS, leg | {"stream": streamed})
    await asyncio.sleep(5.0)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.stats()["waiting"][0] == 1
    assert (held.status, held.body) == (200 if streamed else 0, b"")
    await first.end()
    await held.end()
    assert held.status == 200


@emulated()
async def test_a_process_behind_the_url_dies_and_the_url_serves_on(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, PULLED | {"max_tokens": 500})
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.5)
    lab.fleet.engine("decode/0").lose_process()
    await exchanged.end()
    assert exchanged.error is not None
    assert exchanged.error.kind is WireFault.RESET
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle
    assert (await lab.post("decode/0", COMPLETIONS, PULLED)).status == 200
