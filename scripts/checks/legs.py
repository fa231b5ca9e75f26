"""What must hold of prefill and decode legs: answers, token ids, pauses, step traces."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from balanceroute.traces import TraceRequest, read_trace, write_native
from checks.fleet import (
    BLOCK_TOKENS,
    CLIENT,
    LATE_PULLS,
    SUCCESSES,
    Checks,
    Engine,
    Fleet,
    Proxy,
    Streaming,
    ask,
    assert_equal,
    essence,
    told_by,
    until,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Tokens of a stream that is to last, near the end of the context.
_LONG = 1900
# A prompt of token ids that ends where a block of the KV cache does.
_FULL_BLOCKS = list(range(300, 300 + 2 * BLOCK_TOKENS))
# Where decode engines have prompts from: what they pull, and what they compute.
_SOURCES = ("external_kv_transfer", "local_compute")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# What a grammar makes of random weights has to end by itself.
_SHORT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
_STRICT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _SHORT}}
# The smallest PNG there is; the tiny model takes no image, so that the refusal is compared.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


def chat(text: str, **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a greedy chat request."""
    messages = [{"role": "user", "content": text}]
    return CHAT, {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
    } | values


def completion(prompt: Any, **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a greedy completion request."""
    return COMPLETIONS, {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
    } | values


def requests() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the requests whose answers are compared, by what they show."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    long = "\n".join(f"def function_{i}(value): return value * {i}" for i in range(60))
    drawn = {"temperature": 0.8, "seed": 11, "n": 2}
    named = {"type": "function", "function": {"name": "get_weather"}}
    return {
        "chat": chat("import os, sys"),
        "chat, streamed": chat("class Reader(io.IOBase):", **usage),
        "completion": completion("for line in file:"),
        "completion, streamed": completion("while True: try:", **usage),
        "token ids": completion([100, 200, 300, 400, 500, 600, 700]),
        "n = 2": chat("with open(path) as file:", **drawn),
        "n = 2, streamed": completion("raise ValueError(", **drawn, **usage),
        "log-probabilities": chat("return None if", logprobs=True, top_logprobs=3),
        "log-probabilities, streamed": completion("print(value", logprobs=2, **usage),
        "tools": chat("What is the weather in Oslo?", tools=[_TOOL]),
        "tools, required": chat(
            "Weather?", tools=[_STRICT_TOOL], tool_choice="required", max_tokens=200
        ),
        "tools, required, streamed": chat(
            "Weather?", tools=[_STRICT_TOOL], tool_choice="required", max_tokens=200, **usage
        ),
        "a JSON schema": chat(
            "Weather?",
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": _SHORT},
            },
        ),
        "tools, named, streamed": chat("Weather?", tools=[_TOOL], tool_choice=named, **usage),
        "stop word": completion("if x:", stop=["e"]),
        "one token": completion("lambda:", max_tokens=1),
        "a long prompt": completion(long),
    }


class LegChecks(Checks):
    """Answers, leases, and engines that die."""

    def check_answers_are_those_of_one_engine(self) -> str:
        pulled, computed = map(self._prompt_tokens, _SOURCES)
        with self._fleet.proxy("same") as proxy:
            for name, (path, body) in requests().items():
                try:
                    self._same(path, body, ask(proxy.url, path, body))
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None
        pulled_after, computed_after = map(self._prompt_tokens, _SOURCES)
        assert pulled_after > pulled
        # A rank computes the last token of a prompt again, to have something to sample from.
        share = (computed_after - computed) / (pulled_after - pulled)
        assert share < 0.05, f"decode ranks computed {share:.0%} of what they pulled"
        return f"{len(requests())} requests, {pulled_after - pulled:.0f} prompt tokens pulled"

    def check_refusals_are_the_engines(self) -> str:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
        refused = (
            (completion("a", max_tokens=100_000), 400),
            (completion("word " * 3000), 400),
            (completion("a", max_tokens=0), 400),
            (completion("a", temperature=-1), 400),
            (completion("a", model="other"), 404),
            (chat("", messages=[{"role": "user", "content": [image]}]), 400),
        )
        with self._fleet.proxy("refusals") as proxy:
            for (path, body), status in refused:
                ours = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=60.0)
                assert ours.status_code == status, f"{ours.status_code}, not {status}"
                theirs = CLIENT.post(f"{self._prefiller.url}{path}", json=body, timeout=60.0)
                same = status != 400 or ours.json() == theirs.json()
                assert same, f"{ours.text[:300]} where {theirs.text[:300]} belongs"
        return f"{len(refused)} of them, an image among them, status and body"

    def check_several_answers_go_where_direct_says(self) -> str:
        path, body = chat("with open(path) as file:", temperature=0.8, seed=11, n=2)
        expected = essence(ask(self._prefiller.url, path, body))
        for direct in ("prefill", "decode"):
            with self._fleet.proxy(f"direct-{direct}", "--direct", direct) as proxy:
                answer = ask(proxy.url, path, body)
                assert_equal(essence(answer), expected)
                line = proxy.line_of(answer["id"].removeprefix("chatcmpl-"))
                assert bool(line["rank"]) == (direct == "decode"), line
        with self._fleet.proxy("direct-refuse", "--direct", "refuse") as proxy:
            answer = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=60.0)
            assert answer.status_code == 400, answer.status_code
        return "from the prefiller, from a decode rank, refused"

    def check_a_client_that_leaves_frees_both_sides(self) -> str:
        with self._fleet.proxy("leaves") as proxy:
            for events in (1, 5):
                with self._streaming(proxy, "def leave():", _LONG) as stream:
                    lines = stream.iter_lines()
                    for _ in range(2 * events):
                        next(lines)
                outcome = proxy.line_of(stream.headers["x-request-id"])["outcome"]
                assert outcome == "cancelled", f"the client did not leave in time: {outcome}"
            took_s = until(self._engines_are_idle, "idle engines")
        return f"no request and no KV block is left {took_s:.1f} s later"

    def check_a_lapsed_lease_is_prefilled_again(self) -> str:
        prefills = self._prefiller.metric(SUCCESSES)

        def lapses(_: Proxy) -> None:
            until(lambda: self._prefiller.metric(SUCCESSES) >= prefills + 3, "another prefill")

        line = self._wait_behind("lapsed", (), lapses)
        assert line["lease_lapses"], f"it was not prefilled again: {line}"
        return f"exact, prefilled {line['lease_lapses']} x again"

    def check_a_lease_that_ends_behind_the_proxys_back_costs_no_answer(self) -> str:
        # A proxy that was told of a longer lease than the engines keep. Mooncake lets the rank wait
        # for ever; NIXL reads the blocks all the same. Nobody has used them since: full blocks stay
        # in the prefix cache, until all others were used. Another block would be the next one's.
        flags = ("--lease-s", "600", "--first-token-timeout-s", "5")

        def ends(proxy: Proxy) -> None:
            assert self._engine_holds(self._prefiller), "no KV cache waits"
            until(lambda: not self._engine_holds(self._prefiller), "the end of the lease")
            assert _pooled(proxy) == 1, "it waits no more"

        late = self._prefiller.metric(LATE_PULLS)
        line = self._wait_behind("gone", flags, ends)
        assert not line["lease_lapses"], f"the proxy knew: {line}"
        if line["retries"]:
            return f"exact, prefilled {line['retries']} x again"
        until(lambda: self._prefiller.metric(LATE_PULLS) > late, "the engine's word of it")
        return "exact; the prefiller counts a pull after the end of a lease"

    def check_a_killed_decode_engine_ends_its_streams_only(self) -> str:
        with self._fleet.proxy("killed", "--policy", "jsq") as proxy:
            streams = [_long(proxy, f"kill {i}") for i in range(2)]
            until(lambda: all(stream.events for stream in streams), "two streams", step_s=0.01)
            victim = self._fleet.decoders[1]
            with victim.paused():
                bound = proxy.bound(victim)
                assert bound == 1, f"{bound} streams on the engine to be killed"
                victim.kill()
            for stream in streams:
                stream.join()
            ends = sorted("error" if stream.error else "whole" for stream in streams)
            assert ends == ["error", "whole"], f"{ends}: {[stream.error for stream in streams]}"
            for i in range(4):
                path, body = completion(f"after the kill {i}")
                ask(proxy.url, path, body)
        return "the other stream is whole, later requests too"

    def check_a_prefiller_killed_after_the_probe_loses_nobody(self) -> str:
        flags = ("--first-token-timeout-s", "5")
        with self._behind("dead-prefiller", flags, "wait for the slot") as (_, first, second):
            self._prefiller.kill()
        assert first.error is None, first.error
        # Its KV cache died with the prefiller, and nobody else can make it.
        assert second.status >= 500 or second.error, "a KV cache from a dead prefiller"
        return f"what streamed is whole; what waited got {second.status or second.error}"

    # How it is done.

    def _engine_holds(self, engine: Engine) -> bool:
        """Return whether an engine keeps KV caches for others.

        A NIXL prefiller looks for ended leases as it steps: an idle one keeps every cache for ever.
        """
        path, body = completion("step", max_tokens=1)
        ask(engine.url, path, body)
        return engine.metric("vllm:kv_cache_usage_perc") > 0.0

    def _engines_are_idle(self) -> bool:
        return not any(
            engine.metric(name)
            for engine in (*self._fleet.prefillers, *self._fleet.decoders)
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            )
        )

    def _wait_behind(
        self, name: str, flags: Sequence[str], meanwhile: Callable[[Proxy], None]
    ) -> dict[str, Any]:
        """Let a prefilled request wait for the only slot while something happens.

        Returns:
            Its line in the log. Its answer is exact.
        """
        path, body = completion(_FULL_BLOCKS, stream=True, ignore_eos=True)
        with self._behind(name, flags, body["prompt"]) as (proxy, first, second):
            meanwhile(proxy)
        for stream in (first, second):
            assert stream.error is None, stream.error
        text = essence(ask(self._prefiller.url, path, body))[1][0]["text"]
        assert second.text == text, f"{second.text!r} and {text!r}"
        return proxy.line_of(second.request_id)

    @contextmanager
    def _behind(
        self, name: str, flags: Sequence[str], prompt: object
    ) -> Iterator[tuple[Proxy, Streaming, Streaming]]:
        """Run a proxy with a stream in its only slot, whose engine stands still, and one behind it.

        However fast an engine is, the slot stays taken. At the end the engine goes on, and both
        streams end.
        """
        decoder = self._fleet.decoders[0]
        with self._fleet.proxy(name, "--batch", "1", *flags, decode=[decoder.url]) as proxy:
            first = _long(proxy, "hold the slot")
            until(lambda: bool(first.events), "the first stream", step_s=0.01)
            with decoder.paused():
                second = _long(proxy, prompt, 24)
                until(lambda: _pooled(proxy) == 1, "the second request in the pool")
                yield proxy, first, second
            first.join()
            second.join()

    @contextmanager
    def _streaming(self, proxy: Proxy, prompt: str, tokens: int) -> Iterator[httpx.Response]:
        path, body = completion(prompt, max_tokens=tokens, stream=True, ignore_eos=True)
        with CLIENT.stream("POST", f"{proxy.url}{path}", json=body, timeout=120.0) as stream:
            yield stream


def _long(proxy: Proxy, prompt: object, tokens: int = _LONG) -> Streaming:
    path, body = completion(prompt, max_tokens=tokens, stream=True, ignore_eos=True)
    return Streaming(proxy.url, path, body)


def _pooled(proxy: Proxy) -> int:
    return int(proxy.state()["pooled"])


# What must hold when the engines are paused and their requests are aborted, through the proxy.

_STREAMS = 4
# Near the end of the context, so that none ends by itself.
_LONG_PAUSED = {"stream": True, "max_tokens": 1_900, "ignore_eos": True}
_LIMIT_S = 30.0


def _ready(proxy: Proxy) -> int:
    return CLIENT.get(f"{proxy.admin_url}/ready", timeout=_LIMIT_S).status_code


def _paused(engine: Engine) -> bool:
    return bool(CLIENT.get(f"{engine.url}/is_paused", timeout=_LIMIT_S).json()["is_paused"])


class PauseChecks(Checks):
    """Engines that are paused, and whose requests are aborted."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._engines = [*fleet.prefillers, *fleet.decoders]

    def check_aborted_streams_end_with_what_they_had(self) -> str:
        with self._fleet.proxy("aborted") as proxy:
            streams = self._streams(proxy)
            done = proxy.order("/abort_requests")
            assert done["aborted"] == _STREAMS, done
            tokens = [self._aborted(stream) for stream in streams]
            path, body = completion("for line in file:")
            ask(proxy.url, path, body)
        return f"{_STREAMS} streams, with {min(tokens)} to {max(tokens)} events; later ones served"

    def check_a_paused_fleet_holds_what_comes_until_it_resumes(self) -> str:
        with self._fleet.proxy("paused") as proxy:
            streams = self._streams(proxy)
            proxy.order("/pause")
            for stream in streams:
                self._aborted(stream)
            assert all(map(_paused, self._engines))
            path, body = chat("import os, sys")
            held = Streaming(proxy.url, path, body | {"stream": True})
            time.sleep(2.0)
            assert not held.events, held.events
            proxy.order("/resume")
            held.join()
            assert held.error is None, held.error
            assert held.events
            assert not any(map(_paused, self._engines))
        return f"{len(self._engines)} engines paused and resumed"

    def check_engines_sleep_and_wake_up(self) -> str:
        """Level 0 alone: a CPU has no memory to give back."""
        with self._fleet.proxy("asleep") as proxy:
            streams = self._streams(proxy)
            done = proxy.order("/sleep?level=0")
            assert (done["status"], done["aborted"]) == ("sleeping", _STREAMS), done
            for stream in streams:
                self._aborted(stream)
            assert all(map(_paused, self._engines))
            # What the engines tell of themselves is read once a second.
            until(lambda: _ready(proxy) == 503, "a proxy that is not ready", step_s=0.2)
            path, body = chat("import os, sys")
            held = Streaming(proxy.url, path, body | {"stream": True})
            time.sleep(2.0)
            assert not held.events, held.events
            woken = proxy.order("/wake_up?tags=scheduling")
            assert (woken["status"], woken["asleep"]) == ("awake", 0), woken
            held.join()
            assert held.error is None, held.error
            assert held.events
            assert _ready(proxy) == 200
        return f"{len(self._engines)} engines slept and woke up"

    def _streams(self, proxy: Proxy) -> list[Streaming]:
        asked = [completion([300 + i, *range(400, 440)], **_LONG_PAUSED) for i in range(_STREAMS)]
        streams = [Streaming(proxy.url, *one) for one in asked]
        until(lambda: all(len(one.events) > 5 for one in streams), "streams", step_s=0.01)
        return streams

    def _aborted(self, stream: Streaming) -> int:
        """Check that a stream ended as an aborted request's does; return its events."""
        stream.join()
        assert stream.error is None, stream.error
        reasons = [choice["finish_reason"] for e in stream.events for choice in e["choices"]]
        assert reasons[-1] == "abort", reasons[-3:]
        assert not any(reasons[:-1])
        return len(stream.events)


# What must hold of /inference/v1/generate: token ids in and out, through prefill and decode legs.

GENERATE = "/inference/v1/generate"
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_EACH = {"include_usage": True, "continuous_usage_stats": True}
# Around the end of a block, where a KV cache of the wrong length would show.
_LENGTHS = (7, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1)


def token_requests() -> Iterator[dict[str, Any]]:
    """Yield bodies, each streamed and not."""
    kinds: list[dict[str, Any]] = [
        {},
        {"output_mode": "text"},
        {"output_mode": "text", "sampling_params": {"logprobs": 2}},
        {"return_token_ids": True, "sampling_params": {"logprobs": 2}},
        {"sampling_params": {"temperature": 1.0, "seed": 5}},
        {"sampling_params": {"stop_token_ids": list(range(0, 2_000, 3))}},
        {"output_mode": "text", "sampling_params": {"stop": ["e"]}},
        {"sampling_params": {"max_tokens": 1}},
        {"sampling_params": {"n": 2, "temperature": 1.0, "seed": 5}},
    ]
    body: dict[str, Any] = {}
    for length in _LENGTHS:
        for number, kind in enumerate(kinds):
            sampling = {"max_tokens": 16, "temperature": 0} | kind.get("sampling_params", {})
            ids = [300 + number, *range(400, 399 + length)]
            body = kind | {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
            yield body
            yield body | _STREAM
    yield body | _STREAM | {"stream_options": _EACH}


def ids_of(answer: Any) -> list[list[int]]:
    """Return the ids of each choice, and those of the prompt."""
    said: dict[int, list[int]] = {}
    for message in answer if isinstance(answer, list) else [answer]:
        said.setdefault(-1, []).extend(message.get("prompt_token_ids") or [])
        for choice in message["choices"]:
            said.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    return [said[index] for index in sorted(said)]


def said_by(answer: Any) -> Any:
    """Return what two engines must agree on, but for the log-probabilities of ids."""
    for message in answer if isinstance(answer, list) else [answer]:
        for choice in message["choices"]:
            content = (choice.get("logprobs") or {}).get("content") or []
            for one in content:
                one.setdefault("token", str(one.get("token_id")))
    return essence(answer)


class TokenChecks(Checks):
    """Token ids in and out."""

    def check_token_ids_in_and_out_are_one_engines(self) -> str:
        before = self._decoded()
        asked = list(token_requests())
        with self._fleet.proxy("tokens") as proxy:
            for body in asked:
                ours, theirs = (
                    ask(url, GENERATE, body) for url in (proxy.url, self._prefiller.url)
                )
                try:
                    assert ids_of(ours) == ids_of(theirs), f"{ids_of(ours)} and {ids_of(theirs)}"
                    assert_equal(said_by(ours), said_by(theirs))
                except AssertionError as error:
                    raise AssertionError(f"{body}: {error}") from None
        decoded = self._decoded() - before
        assert decoded > len(asked) // 2, f"ranks decoded {decoded} of {len(asked)}"
        return f"{len(asked)} requests, {decoded:.0f} of them decoded by ranks"


# A slice of a real trace through real engines, and the proxy's picture of it against theirs.

_TRACE = Path(__file__).parents[2] / "traces" / "public" / "azure_2023_conv.csv.gz"
REQUESTS = 240
CONCURRENCY = 12
# Of the mirrored load, relative to the engines'.
MEDIAN_ERROR = 0.02
# Into the tiny model's context of 2,048: a word of a prompt is some four of its tokens.
_PROMPT_PART = 10


def scaled(path: Path, output_part: int) -> None:
    """Write the slice, each answer divided by `output_part`."""
    requests = [request for request in read_trace(_TRACE) if request.output_tokens][:REQUESTS]
    write_native(
        path,
        [
            TraceRequest(
                request.arrival_ns,
                max(1, request.prompt_tokens // _PROMPT_PART),
                max(1, request.output_tokens // output_part),
            )
            for request in requests
        ],
    )


class TraceChecks(Checks):
    """A slice of a real trace.

    Attributes:
        output_part: What answers are divided by.
    """

    output_part = 1

    def check_doctor_sees_each_pair_pull_and_finds_the_command(self) -> str:
        words = [sys.executable, "-m", "balanceroute", "doctor", "--json"]
        words += ["--prefill", *(engine.url for engine in self._fleet.prefillers)]
        words += ["--decode", *(engine.url for engine in self._fleet.decoders)]
        if "--bootstrap" in self._fleet.flags:
            place = self._fleet.flags.index("--bootstrap")
            words += self._fleet.flags[place : place + 2]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300.0, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        pairs = len(self._fleet.prefillers) * len(self._fleet.decoders)
        assert [pair["pulled"] for pair in told["pairs"]] == [True] * pairs, told["pairs"]
        return shlex.join(told["serve"])

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._loads = fleet.folder / "loads.jsonl"

    def check_a_trace_slice_is_served_without_an_error(self) -> str:
        with self._fleet.proxy("trace", "--load-log", str(self._loads)) as proxy:
            report = self._replay(proxy)
        assert report["finished"] == REQUESTS, report
        return (
            f"{REQUESTS} requests of the Azure conversation trace, "
            f"{report['output_tokens_per_s']:.0f} tokens/s"
        )

    def check_the_mirrored_load_is_the_engines(self) -> str:
        report = self._validated()
        started, fit = report["started"], report["fit"]
        assert started["p50"] <= MEDIAN_ERROR, f"the median error is {started['p50']:.1%}"
        lags = ", ".join(f"{rank['lag']['lag_ms']:+.0f} ms" for rank in report["ranks"])
        return (
            f"median error {started['p50']:.2%} of {started['samples']} samples, lag {lags}; "
            f"T = {fit['base_ms']:.1f} ms + {fit['us_per_token']:.2f} us x max L, R2 {fit['r2']:.2f}"
        )

    def _validated(self) -> dict[str, Any]:
        """Return what `balanceroute validate` says of the trace slice."""
        figures = self._fleet.folder / "validate.json"
        command = ["validate", "--steps", str(self._fleet.steps), "--log", str(self._loads)]
        return told_by(*command, "--min-tokens", "50", into=figures)

    def _replay(self, proxy: Proxy) -> dict[str, float]:
        trace = self._fleet.folder / "slice.jsonl"
        scaled(trace, self.output_part)
        command = ["replay", "--target", proxy.url, "--trace", str(trace)]
        command += ["--concurrency", str(CONCURRENCY)]
        figures: dict[str, float]
        (figures,) = told_by(*command, into=self._fleet.folder / "replay.json")["results"]
        assert figures["errors"] == 0, figures
        for prefiller in self._fleet.prefillers:
            late = prefiller.metric(LATE_PULLS)
            assert not late, f"{late:.0f} KV caches were pulled after their lease"
        return figures
