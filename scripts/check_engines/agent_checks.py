"""What must hold of the APIs that agents speak: messages and responses, through prefill and decode legs."""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from agent_requests import (
    MESSAGES,
    RESPONSES,
    draw_messages,
    draw_responses,
    long_prompt,
    told,
    with_image,
)
from client import CLIENT
from fleet import Fleet, Proxy, until
from pd_checks import CHAT, IMAGE, chat

sys.path.insert(0, str(Path(__file__).parents[1] / "client_checks"))

from wire_checks import send, wires

REQUESTS = 200
"""So many of each API are compared."""

_AT_A_TIME = 4
_WIRE_TOKENS = 40
_OK = 200
_SOURCE = "vllm:prompt_tokens_by_source_total"
# Of what ranks have of prompts, they compute no more than the last token of each.
_COMPUTED = 0.1
_TRIALS = 7
_STREAMS = 6
_STREAMED_TOKENS = 800
# How much longer than by chat others may wait. Below the floor a gap is the machine's own.
_LONGER = 1.5
_FLOOR_S = 0.015


class AgentChecks:
    """The checks, in the order in which they run. The name of a method is what it claims.

    Args:
        fleet: What runs.
        long_words: Words of a prompt that is long beside a step, and fits.
    """

    def __init__(self, fleet: Fleet, *, long_words: int) -> None:
        self._fleet = fleet
        self._single = fleet.prefillers[0]
        self._long_words = long_words

    def check_messages_are_those_of_one_engine(self) -> str:
        return self._compare(MESSAGES, draw_messages)

    def check_responses_are_those_of_one_engine(self) -> str:
        return self._compare(RESPONSES, draw_responses)

    def check_what_an_engine_refuses_of_agents_is_refused_in_its_words(self) -> str:
        ask = {"messages": [{"role": "user", "content": "a"}], "model": "tiny", "max_tokens": 4}
        said = {"input": "a", "model": "tiny"}
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        refused: list[tuple[str, dict[str, Any]]] = [
            *((path, with_image(path, IMAGE)) for path in (MESSAGES, RESPONSES)),
            (MESSAGES, ask | {"max_tokens": 0}),
            (MESSAGES, ask | {"max_tokens": 100_000}),
            (MESSAGES, ask | {"tools": [hosted]}),
            (MESSAGES, ask | {"temperature": -1}),
            (MESSAGES, ask | {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
            (RESPONSES, said | {"max_output_tokens": 0}),
            (RESPONSES, said | {"tools": [{"type": "custom", "name": "a", "format": grammar}]}),
            (RESPONSES, said | {"tools": [{"type": "nothing"}]}),
            (RESPONSES, said | {"tool_choice": "required"}),
            (RESPONSES, said | {"input": [{"type": "item_reference", "id": "a"}]}),
            (RESPONSES, said | {"prompt": {"id": "a"}}),
        ]
        with self._fleet.proxy("agents-refused") as proxy:
            for path, body in refused:
                ours, theirs = (
                    CLIENT.post(f"{url}{path}", json=body, timeout=60.0)
                    for url in (proxy.url, self._single.url)
                )
                words = [one.json()["error"]["message"] for one in (ours, theirs)]
                # The types of Anthropic's errors are vLLM's own until 0.33.
                same = words[0] == words[1] and (path == MESSAGES or ours.json() == theirs.json())
                assert same, f"{body}: {ours.text[:200]} and {theirs.text[:200]}"
                assert ours.status_code == 400, f"{body}: {ours.text[:200]}"
        return f"{len(refused)} of them, images among them: the tiny models take none"

    def check_claude_code_and_codex_get_what_one_engine_answers(self) -> str:
        statuses: Counter[int] = Counter()
        with self._fleet.proxy("agents-wires") as proxy:
            for wire in wires():
                # The tiny models' context is short, and equal answers need no chance.
                limit = "max_output_tokens" if "input" in wire.body else "max_tokens"
                members = {"model": "tiny", "temperature": 0, limit: _WIRE_TOKENS}
                answers = []
                for url in (proxy.url, self._single.url):
                    status, text = send(url, wire, members)
                    stream = status == _OK and wire.body.get("stream") is True
                    answers.append((status, told(text, stream=stream)))
                assert answers[0] == answers[1], f"{wire.name}: {answers[0]} and {answers[1]}"
                statuses[answers[0][0]] += 1
        seen = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
        return f"{statuses.total()} requests, answered with {seen}"

    def check_a_long_prompt_of_an_agent_holds_up_nobody(self) -> str:
        gaps: dict[str, list[float]] = {CHAT: [], MESSAGES: [], RESPONSES: []}
        before = self._prompt_tokens()
        with self._fleet.proxy("agents-long") as proxy:
            for number in range(_TRIALS):
                for path, found in gaps.items():
                    found.append(self._longest_gap(proxy, path, number))
        self._had_from_prefillers(before)
        by_chat = max(median(gaps[CHAT]), _FLOOR_S)
        seen = ", ".join(f"{path} {1000 * median(found):.1f} ms" for path, found in gaps.items())
        for path in (MESSAGES, RESPONSES):
            assert median(gaps[path]) <= _LONGER * by_chat, f"longest gaps of others: {seen}"
        return f"longest gap of {_STREAMS} streams, median of {_TRIALS}: {seen}"

    # How it is done.

    def _compare(self, path: str, draw: Callable[[random.Random, int], dict[str, Any]]) -> str:
        before = self._prompt_tokens()
        rng = random.Random(path)
        bodies = [draw(rng, number) for number in range(REQUESTS)]
        name = f"agents-{path.rpartition('/')[2]}"
        with self._fleet.proxy(name) as proxy, ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = pool.map(lambda body: self._difference(proxy, path, body), bodies)
            wrong = list(filter(None, found))
        assert not wrong, f"{len(wrong)} of {len(bodies)} differ: {wrong[0]}"
        pulled = self._had_from_prefillers(before)
        streamed = sum(bool(body.get("stream")) for body in bodies)
        return f"{len(bodies)} requests, {streamed} streamed; {pulled:.0f} prompt tokens pulled"

    def _difference(self, proxy: Proxy, path: str, body: dict[str, Any]) -> str:
        """Return how an answer differs from the single engine's; empty if it does not."""
        stream = bool(body.get("stream"))
        answers = []
        try:
            for url in (proxy.url, self._single.url):
                answer = CLIENT.post(f"{url}{path}", json=body, timeout=240.0)
                assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
                answers.append(told(answer.text, stream=stream))
        except (AssertionError, httpx.HTTPError) as error:
            return f"{body}: {error!r}"
        if answers[0] == answers[1]:
            return ""
        for one, other in zip(*answers, strict=False):
            if one != other:
                return f"{body}: {one} where {other} belongs"
        return f"{body}: {len(answers[0])} events for {len(answers[1])}"

    def _had_from_prefillers(self, before: tuple[float, float]) -> float:
        """Return the prompt tokens that decode ranks have had from elsewhere since `before`.

        Raises:
            AssertionError: They computed more than the last tokens of prompts.
        """
        had, computed = (
            after - earlier for after, earlier in zip(self._prompt_tokens(), before, strict=True)
        )
        share = computed / max(1.0, had + computed)
        assert share <= _COMPUTED, (
            f"the answers are right, but decode ranks computed {share:.0%} of the prompts: "
            f"{computed:.0f} tokens, and had {had:.0f} from prefillers and caches"
        )
        return had

    def _prompt_tokens(self) -> tuple[float, float]:
        """Return the prompt tokens that decode ranks had from elsewhere, and those they computed."""
        had = [
            one.metric(_SOURCE, source=source)
            for one in self._fleet.decoders
            for source in ("external_kv_transfer", "local_cache_hit")
        ]
        return sum(had), sum(
            one.metric(_SOURCE, source="local_compute") for one in self._fleet.decoders
        )

    def _longest_gap(self, proxy: Proxy, path: str, number: int) -> float:
        """Return the longest time without an event of any stream while a long prompt is served."""
        streams = [_Stream(proxy, f"{number} {path} {i}") for i in range(_STREAMS)]
        until(lambda: all(len(one.times) > 1 for one in streams), "all streams", step_s=0.01)
        begin_s = time.monotonic()
        body = long_prompt(path, number, self._long_words)
        answer = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=120.0)
        assert answer.status_code == 200, answer.text[:300]
        end_s = time.monotonic()
        time.sleep(0.05)
        for one in streams:
            one.leave()
        gaps = [gap for one in streams for gap in one.gaps(begin_s, end_s)]
        assert gaps, "the streams ended too soon"
        return max(gaps)


class _Stream:
    """A streamed chat whose events are timed.

    Attributes:
        times: When each came, on the monotonic clock.
    """

    def __init__(self, proxy: Proxy, text: str) -> None:
        self.times: list[float] = []
        self._left = False
        path, body = chat(text, max_tokens=_STREAMED_TOKENS, stream=True, ignore_eos=True)
        self._url, self._body = f"{proxy.url}{path}", body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Return the times between events of which the later one came between two moments."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [
            later - earlier for earlier, later in pairs if begin_s <= later and earlier <= end_s
        ]

    def leave(self) -> None:
        """Read no further, and wait until the connection is closed."""
        self._left = True
        self._thread.join(60.0)

    def _read(self) -> None:
        with CLIENT.stream("POST", self._url, json=self._body, timeout=240.0) as answer:
            for _ in answer.iter_raw():
                self.times.append(time.monotonic())
                if self._left:
                    return
