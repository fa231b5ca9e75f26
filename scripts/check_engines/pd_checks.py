"""What must hold with one prefiller and two decode engines, whatever moves the KV caches.

The prefiller, asked directly, is the single engine to compare with: it computes what it answers, while
what a decode rank answers rests on what it pulled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from answers import ask, assert_equal, essence
from client import CLIENT
from engines import BLOCK_TOKENS, Engine
from fleet import LATE_PULLS, SUCCESSES, Fleet, Proxy, until
from streaming import Streaming

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Tokens of a stream that is to last, near the end of the context.
_LONG = 1900
# A prompt of token ids that ends where a block of the KV cache does.
_FULL_BLOCKS = list(range(300, 300 + 2 * BLOCK_TOKENS))
_SOURCE = "vllm:prompt_tokens_by_source_total"
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


class Checks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefiller = fleet.prefillers[0]

    def check_answers_are_those_of_one_engine(self) -> str:
        pulled, computed = self._prompt_tokens()
        with self._fleet.proxy("same") as proxy:
            for name, (path, body) in requests().items():
                try:
                    ours = essence(ask(proxy.url, path, body))
                    assert_equal(ours, essence(ask(self._prefiller.url, path, body)))
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None
        pulled_after, computed_after = self._prompt_tokens()
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
                if status == 400:
                    assert ours.json() == theirs.json()
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

    def _prompt_tokens(self) -> tuple[float, float]:
        """Return the prompt tokens that decode engines pulled, and those they computed."""
        return (
            sum(one.metric(_SOURCE, source="external_kv_transfer") for one in self._fleet.decoders),
            sum(one.metric(_SOURCE, source="local_compute") for one in self._fleet.decoders),
        )

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
    state: Any = proxy.state()
    return int(state["state"]["pooled"])
