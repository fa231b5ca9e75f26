"""What must hold where decode ranks compute prompts: short ones, and a conversation's next turns."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from answers import ask, assert_equal, essence
from engines import BLOCK_TOKENS, metric
from fleet import SUCCESSES, Fleet, Proxy, until
from pd_checks import completion

_LIMIT_TOKENS = 256
_FLAGS = ("--local-prefill-tokens", str(_LIMIT_TOKENS))
_SHORT, _LONG = 8, 4
_CONVERSATIONS, _TURNS = 6, 4
# Of a conversation's first prompt, and of what a client adds in a turn.
_FIRST_TOKENS, _FURTHER_TOKENS, _ANSWER_TOKENS = 300, 90, 24
_SOURCE = "vllm:prompt_tokens_by_source_total"
_HITS = "vllm:prefix_cache_hits_total"
_STRAIGHT = "balanceroute_local_prefills_total"


@dataclass
class _Conversation:
    """What a client keeps of it: its name, all token ids so far, and the rank of the last turn."""

    name: str
    ids: list[int] = field(default_factory=list)
    rank: str = ""


class LocalityChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefiller = fleet.prefillers[0]
        self._rng = random.Random(16)

    def check_short_prompts_go_straight_to_a_rank(self) -> str:
        with self._fleet.proxy("straight", *_FLAGS) as proxy:
            for _ in range(_LONG):
                line = self._ask(proxy, self._ids(_LIMIT_TOKENS + 50))[1]
                assert not line["local_prefill"], "a long prompt went straight to a rank"
                assert line["prefiller"], line
            prompts = [self._ids(10 + 30 * number) for number in range(_SHORT)]
            prefilled = self._prefiller.metric(SUCCESSES)
            pulled, computed = self._by_source("external_kv_transfer", "local_compute")
            ours = []
            for number, prompt in enumerate(prompts):
                answer, line = self._ask(proxy, prompt, stream=bool(number % 2))
                assert line["local_prefill"], f"a prompt of {len(prompt)} tokens was prefilled"
                ours.append(answer)
            # What the proxy counts is what the engines did.
            wanted = computed + sum(map(len, prompts))
            until(lambda: self._by_source("local_compute") == [wanted], "the ranks computed all")
            assert self._by_source("external_kv_transfer") == [pulled], "a rank pulled"
            assert self._prefiller.metric(SUCCESSES) == prefilled, "the prefiller worked"
            counted = metric(proxy.url, _STRAIGHT)
            assert counted == _SHORT, f"the proxy counts {counted:.0f}"
        for number, (prompt, answer) in enumerate(zip(prompts, ours, strict=True)):
            path, body = completion(prompt, ignore_eos=True, stream=bool(number % 2))
            assert_equal(essence(answer), essence(ask(self._prefiller.url, path, body)))
        return f"{_SHORT} of {sum(map(len, prompts))} tokens, exact; {_LONG} longer ones did not"

    def check_a_conversation_returns_to_its_rank(self) -> str:
        talks = [_Conversation(f"talk {number}") for number in range(_CONVERSATIONS)]
        for talk in talks:
            talk.ids = self._ids(_FIRST_TOKENS)
        found = asked = 0
        with self._fleet.proxy("turns", *_FLAGS) as proxy:
            # At once, so that the ranks share them.
            with ThreadPoolExecutor(_CONVERSATIONS) as threads:
                list(threads.map(partial(self._turn, proxy), talks))
            ranks = {talk.rank for talk in talks}
            assert len(ranks) == len(self._fleet.decoders), f"all talks are on {ranks}"
            for _ in range(1, _TURNS):
                for talk in talks:
                    known, rank, hits = len(talk.ids), talk.rank, self._hits()
                    talk.ids += self._ids(_FURTHER_TOKENS)
                    cached, line = self._turn(proxy, talk)
                    assert line["local_prefill"], "a later turn was prefilled"
                    assert talk.rank == rank, f"a later turn went to {talk.rank}, not to {rank}"
                    counted = hits | {rank: hits[rank] + cached}
                    until(partial(self._is_counted, counted), f"{cached} hits at {rank} alone")
                    # The last token of an answer is in no cache, nor is a block that is not full.
                    full = (known - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    assert cached == full, f"{cached} tokens cached, not {full}"
                    found, asked = found + cached, asked + len(talk.ids) - _ANSWER_TOKENS
            # Another conversation of the same length has to be prefilled.
            line = self._ask(proxy, self._ids(_FIRST_TOKENS + _FURTHER_TOKENS))[1]
            assert not line["local_prefill"], "a long first turn went straight to a rank"
        turns = _CONVERSATIONS * (_TURNS - 1)
        return f"{turns} turns, {found} of {asked} tokens cached as the engines count, on {len(ranks)} ranks"

    # How it is done.

    def _ids(self, tokens: int) -> list[int]:
        """Return token ids that nobody has cached."""
        return [self._rng.randrange(100, 900) for _ in range(tokens)]

    def _ask(
        self, proxy: Proxy, prompt: Sequence[int], *, session: str = "", **values: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the answer to a prompt, and the log's line."""
        path, body = completion(list(prompt), ignore_eos=True, **values)
        headers = {"x-session-id": session} if session else {}
        answer = ask(proxy.url, path, body, headers=headers)
        name = answer["id"] if isinstance(answer, dict) else answer[0]["id"]
        return answer, proxy.line_of(name.removeprefix("cmpl-"))

    def _turn(self, proxy: Proxy, talk: _Conversation) -> tuple[int, dict[str, Any]]:
        """Carry on a conversation by one turn, compared with one engine's.

        Returns:
            The cached tokens of the answer's usage, and the log's line.
        """
        values = {"max_tokens": _ANSWER_TOKENS, "return_token_ids": True}
        answer, line = self._ask(proxy, talk.ids, session=talk.name, **values)
        path, body = completion(list(talk.ids), ignore_eos=True, **values)
        assert_equal(essence(answer), essence(ask(self._prefiller.url, path, body)))
        talk.ids += answer["choices"][0]["token_ids"]
        talk.rank = line["rank"]
        details = answer["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0), line

    def _by_source(self, *sources: str) -> list[float]:
        """Return the prompt tokens of all ranks that came from each source."""
        return [
            sum(one.metric(_SOURCE, source=source) for one in self._fleet.decoders)
            for source in sources
        ]

    def _is_counted(self, hits: dict[str, float]) -> bool:
        return self._hits() == hits

    def _hits(self) -> dict[str, float]:
        """Return the prompt tokens that each rank found in its cache, by its name."""
        return {one.url: one.metric(_HITS) for one in self._fleet.decoders}
