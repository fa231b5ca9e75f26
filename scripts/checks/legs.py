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

from balanceroute.traces import TraceRequest, read_trace, write_native
from checks.agents import compare_all
from checks.fleet import (
    BLOCK_TOKENS,
    CLIENT,
    GENERATE,
    IMAGE,
    LATE_PULLS,
    ROOT,
    SUCCESSES,
    Checks,
    Engine,
    Fleet,
    Proxy,
    Streaming,
    ask,
    begun,
    chat,
    completion,
    essence,
    json_of,
    until,
)
from checks.packages import CITY_SCHEMA, TOOL

# Tokens of a stream that is to last, near the end of the context.
_LONG: dict[str, Any] = {"max_tokens": 1_900, "stream": True, "ignore_eos": True}
# A prompt of token ids that ends where a block of the KV cache does.
_FULL_BLOCKS = list(range(300, 300 + 2 * BLOCK_TOKENS))
# Where decode engines have prompts from: what they pull, and what they compute.
_SOURCES = ("external_kv_transfer", "local_compute")
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return the requests whose answers are compared."""
    long = "\n".join(f"def function_{i}(value): return value * {i}" for i in range(60))
    drawn = {"temperature": 0.8, "seed": 11, "n": 2}
    free = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    tool = {"tools": [{"type": "function", "function": free}]}
    named = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    strict = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    schema = {"name": "weather", "schema": CITY_SCHEMA}
    return [
        chat("import os, sys"),
        chat("class Reader(io.IOBase):", **_USAGE),
        completion("for line in file:"),
        completion("while True: try:", **_USAGE),
        completion([100, 200, 300, 400, 500, 600, 700]),
        chat("with open(path) as file:", **drawn),
        completion("raise ValueError(", **drawn, **_USAGE),
        chat("return None if", logprobs=True, top_logprobs=3),
        completion("print(value", logprobs=2, **_USAGE),
        chat("What is the weather in Oslo?", **tool),
        chat("Weather?", **strict),
        chat("Weather?", **strict, **_USAGE),
        chat("Weather?", **tool, **named, **_USAGE),
        chat(
            "Weather?",
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": schema},
        ),
        completion("if x:", stop=["e"]),
        completion("lambda:", max_tokens=1),
        completion(long),
    ]


class LegChecks(Checks):
    """Answers, leases, and engines that die."""

    def check_answers_are_those_of_one_engine(self) -> str:
        pulled, computed = map(self._prompt_tokens, _SOURCES)
        with self._fleet.proxy("same") as proxy:
            compare_all(proxy, self._prefiller, requests(), 1)
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
                ours, theirs = self._both(proxy, path, body)
                assert ours.status_code == status, f"{ours.status_code}, not {status}"
                alike = status != 400 or ours.json() == theirs.json()
                assert alike, f"{ours.text[:300]} where {theirs.text[:300]} belongs"
        return f"{len(refused)} of them, an image among them, status and body"

    def check_a_client_that_leaves_frees_both_sides(self) -> str:
        with self._fleet.proxy("leaves") as proxy:
            for events in (1, 5):
                (stream,) = begun(proxy, [completion("def leave():", **_LONG)], events)
                stream.leave()
                outcome = proxy.line_of(stream.request_id)["outcome"]
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
        # A proxy with a longer lease than the engines keep. Mooncake lets the rank wait for ever; NIXL
        # reads the blocks all the same. No request has used them since: full blocks stay in the prefix
        # cache until all free blocks were used. Another block would be the next request's.
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
            streams = begun(proxy, [completion(f"kill {i}", **_LONG) for i in range(2)], 1)
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
                ask(proxy.url, *completion(f"after the kill {i}"))
        return "the other stream is whole, later requests too"

    def check_a_prefiller_killed_after_the_probe_loses_nobody(self) -> str:
        flags = ("--first-token-timeout-s", "5")
        with self._behind("dead-prefiller", flags, "wait for the slot") as (_, first, second):
            self._prefiller.kill()
        assert first.error is None, first.error
        # Its KV cache died with the prefiller, and no other engine can make it.
        assert second.status >= 500 or second.error, "a KV cache from a dead prefiller"
        return f"what streamed is whole; what waited got {second.status or second.error}"

    # How it is done.

    def _engine_holds(self, engine: Engine) -> bool:
        """Return whether an engine keeps KV caches for other engines.

        A NIXL prefiller looks for ended leases as it steps: an idle one keeps every cache for ever.
        """
        ask(engine.url, *completion("step", max_tokens=1))
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
            (first,) = begun(proxy, [completion("hold the slot", **_LONG)], 1)
            with decoder.paused():
                asked = completion(prompt, **_LONG | {"max_tokens": 24})
                second = Streaming(proxy.url, *asked)
                until(lambda: _pooled(proxy) == 1, "the second request in the pool")
                yield proxy, first, second
            first.join()
            second.join()


def _pooled(proxy: Proxy) -> int:
    return int(proxy.state()["pooled"])


# What must hold when the engines are paused and their requests are aborted, through the proxy.

_STREAMS = 4


class PauseChecks(Checks):
    """Engines that are paused, and whose requests are aborted."""

    def check_aborted_streams_end_with_what_they_had(self) -> str:
        with self._aborted("aborted", "/abort_requests") as (proxy, done):
            assert done["aborted"] == _STREAMS, done
            ask(proxy.url, *completion("for line in file:"))
        return f"{_STREAMS} streams; later ones are served"

    def check_a_paused_fleet_holds_what_comes_until_it_resumes(self) -> str:
        with self._aborted("paused", "/pause") as (proxy, _), self._held(proxy):
            proxy.order("/resume")
        return "all engines paused and resumed"

    def check_engines_sleep_and_wake_up(self) -> str:
        """Level 0 alone: a CPU has no memory to give back."""
        with self._aborted("asleep", "/sleep?level=0") as (proxy, done):
            assert (done["status"], done["aborted"]) == ("sleeping", _STREAMS), done
            # The proxy reads the engines' metrics once a second.
            until(lambda: _ready(proxy) == 503, "a proxy that is not ready", step_s=0.2)
            with self._held(proxy):
                woken = proxy.order("/wake_up?tags=scheduling")
                assert (woken["status"], woken["asleep"]) == ("awake", 0), woken
            assert _ready(proxy) == 200
        return "all engines slept and woke up"

    # How it is done.

    def _are_paused(self) -> list[bool]:
        engines = (*self._fleet.prefillers, *self._fleet.decoders)
        pages = [CLIENT.get(f"{one.url}/is_paused", timeout=30.0) for one in engines]
        return [bool(page.json()["is_paused"]) for page in pages]

    @contextmanager
    def _aborted(self, name: str, order: str) -> Iterator[tuple[Proxy, dict[str, Any]]]:
        """Give an order while streams run, all of which end as an aborted request's does."""
        with self._fleet.proxy(name) as proxy:
            prompts = [[300 + i, *range(400, 440)] for i in range(_STREAMS)]
            streams = begun(proxy, [completion(ids, **_LONG) for ids in prompts], 6)
            done = proxy.order(order)
            for stream in streams:
                stream.join()
                assert stream.error is None, stream.error
                reasons = [one["finish_reason"] for e in stream.events for one in e["choices"]]
                assert reasons[-1] == "abort", reasons[-3:]
                assert not any(reasons[:-1])
            yield proxy, done

    @contextmanager
    def _held(self, proxy: Proxy) -> Iterator[None]:
        """Ask paused engines, which do nothing until they go on."""
        assert all(self._are_paused())
        path, body = chat("import os, sys", stream=True)
        held = Streaming(proxy.url, path, body)
        time.sleep(2.0)
        assert not held.events, held.events
        yield
        held.join()
        assert held.error is None, held.error
        assert held.events
        assert not any(self._are_paused())


def _ready(proxy: Proxy) -> int:
    return CLIENT.get(f"{proxy.admin_url}/ready", timeout=30.0).status_code


# What must hold of /inference/v1/generate: token ids in and out, through prefill and decode legs.

# Around the end of a block, where a KV cache of the wrong length would show.
_LENGTHS = (7, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1)


def token_requests() -> Iterator[dict[str, Any]]:
    """Yield bodies, each streamed and not."""
    drawn, text = {"temperature": 1.0, "seed": 5}, {"output_mode": "text"}
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (text, {}),
        (text, {"logprobs": 2}),
        ({"return_token_ids": True}, {"logprobs": 2}),
        ({}, drawn),
        ({}, {"stop_token_ids": list(range(0, 2_000, 3))}),
        (text, {"stop": ["e"]}),
        ({}, {"max_tokens": 1}),
        ({}, drawn | {"n": 2}),
    ]
    body: dict[str, Any] = {}
    for length in _LENGTHS:
        for number, (kind, sampling) in enumerate(kinds):
            ids = [300 + number, *range(400, 399 + length)]
            body = kind | {"model": "tiny", "token_ids": ids}
            body["sampling_params"] = {"max_tokens": 16, "temperature": 0} | sampling
            yield body
            yield body | _USAGE
    each = {"include_usage": True, "continuous_usage_stats": True}
    yield body | {"stream": True, "stream_options": each}


class TokenChecks(Checks):
    """Token ids in and out."""

    def check_token_ids_in_and_out_are_one_engines(self) -> str:
        before = self._decoded()
        asked = [(GENERATE, body) for body in token_requests()]
        with self._fleet.proxy("tokens") as proxy:
            compare_all(proxy, self._prefiller, asked, 1)
        decoded = self._decoded() - before
        assert decoded > len(asked) // 2, f"ranks decoded {decoded} of {len(asked)}"
        return f"{len(asked)} requests, {decoded:.0f} of them decoded by ranks"


# A slice of a real trace through real engines, and the proxy's picture of it against theirs.

_TRACE = ROOT / "traces" / "public" / "azure_2023_conv.csv.gz"
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
        flags = list(self._fleet.flags)
        words += flags[flags.index("--bootstrap") :][:2] if "--bootstrap" in flags else []
        done = subprocess.run(words, capture_output=True, text=True, timeout=300.0, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout)
        pairs = len(self._fleet.prefillers) * len(self._fleet.decoders)
        assert [pair["pulled"] for pair in report["pairs"]] == [True] * pairs, report["pairs"]
        return shlex.join(report["serve"])

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
        return json_of(*command, "--min-tokens", "50", into=figures)

    def _replay(self, proxy: Proxy) -> dict[str, float]:
        trace = self._fleet.folder / "slice.jsonl"
        scaled(trace, self.output_part)
        command = ["replay", "--target", proxy.url, "--trace", str(trace)]
        command += ["--concurrency", str(CONCURRENCY)]
        figures: dict[str, float]
        (figures,) = json_of(*command, into=self._fleet.folder / "replay.json")["results"]
        assert figures["errors"] == 0, figures
        for prefiller in self._fleet.prefillers:
            late = prefiller.metric(LATE_PULLS)
            assert not late, f"{late:.0f} KV caches were pulled after their lease"
        return figures
