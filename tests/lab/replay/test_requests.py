"""Bodies: what a request asks for, and that building them ahead changes nothing but the time."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.played import played_by

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.tokens import tokenise
from balanceroute.proxy.lab.replay import requests
from balanceroute.proxy.lab.replay.requests import (
    BLOCK_WORDS,
    PlannedRequest,
    PromptBuilder,
    ReplayApi,
    ReplayBodies,
    ReplayLengths,
    SharedExchange,
    due_s,
    plan,
    read_exchanges,
    request_body,
    with_exchanges,
)
from balanceroute.traces import TraceRequest

REQUESTS = [PlannedRequest(number, 0, 10 + number, 5) for number in range(200)]
EXPECTED = [
    request_body(
        ReplayApi.COMPLETIONS,
        model="m",
        prompt=PromptBuilder(0).build(request),
        max_tokens=5,
        ignore_eos=True,
    )
    for request in REQUESTS
]


class Counting(PromptBuilder):
    """Counts what it builds."""

    built = 0

    def build(self, request: PlannedRequest) -> str:
        self.built += 1
        return super().build(request)


async def turn(times: int) -> None:
    """Let the loop turn so many times."""
    for _ in range(times):
        await asyncio.sleep(0)


def queued(check: Callable[[ReplayBodies, Counting], Awaitable[None]]) -> None:
    """Run a check on a queue, which is closed behind it."""

    async def main() -> None:
        prompts = Counting(0)
        queue = ReplayBodies(
            REQUESTS,
            prompts,
            api=ReplayApi.COMPLETIONS,
            model="m",
            lengths=ReplayLengths.MAX_TOKENS,
            request_ids="replay",
            loop=asyncio.get_running_loop(),
        )
        await check(queue, prompts)
        queue.close()

    asyncio.run(main())


queueing = played_by(queued, places=2)


@pytest.mark.parametrize(
    ("api", "prompt"),
    [
        (ReplayApi.COMPLETIONS, {"prompt": "t1 é"}),
        (ReplayApi.CHAT, {"messages": [{"role": "user", "content": "t1 é"}]}),
    ],
)
@pytest.mark.parametrize(
    ("limit", "ignore_eos", "asked"),
    [
        (7, True, {"max_tokens": 7, "ignore_eos": True}),
        (7, False, {"max_tokens": 7}),
        (None, False, {}),
    ],
)
def test_a_body_asks_for_a_stream_with_the_limit_that_there_is(
    api: ReplayApi,
    prompt: dict[str, object],
    limit: int | None,
    ignore_eos: bool,
    asked: dict[str, object],
) -> None:
    body = request_body(api, model="m", prompt="t1 é", max_tokens=limit, ignore_eos=ignore_eos)
    assert json.loads(body) == {
        "model": "m",
        **prompt,
        **asked,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("api", "prompt", "limit", "named"),
    [
        (ReplayApi.MESSAGES, {"messages": [{"role": "user", "content": "t1"}]}, "max_tokens", {}),
        (
            ReplayApi.RESPONSES,
            {"input": "t1"},
            "max_output_tokens",
            {"ignore_eos": True, "request_id": "a-1"},
        ),
    ],
)
def test_a_body_of_an_agents_api_has_the_members_that_there_are(
    api: ReplayApi, prompt: dict[str, object], limit: str, named: dict[str, object]
) -> None:
    body = request_body(
        api, model="m", prompt="t1", max_tokens=7, ignore_eos=True, request_id="a-1"
    )
    wanted = {"model": "m", **prompt, limit: 7, "temperature": 0, "stream": True, **named}
    assert json.loads(body) == wanted


def test_each_api_has_its_path() -> None:
    assert ReplayApi.MESSAGES.path == "/v1/messages"
    assert ReplayApi.RESPONSES.path == "/v1/responses"
    assert ReplayApi.CHAT.path == "/v1/chat/completions"
    assert ReplayApi.COMPLETIONS.path == "/v1/completions"


@pytest.mark.parametrize("turns", [0, 1, 300])
@queueing()
async def test_bodies_come_in_the_order_of_the_requests(
    queue: ReplayBodies, _: Counting, turns: int
) -> None:
    await turn(turns)
    assert [queue.take() for _ in REQUESTS] == EXPECTED


@pytest.mark.parametrize(
    ("turns", "max_bytes", "built"),
    [
        (4, None, 4),  # One in each turn of the loop.
        (300, None, requests.MAX_BODIES),
        (300, 1 + sum(map(len, EXPECTED[:2])), 3),
    ],
)
def test_no_more_are_built_ahead_than_number_and_memory_allow(
    turns: int, max_bytes: int | None, built: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(_: ReplayBodies, prompts: Counting) -> None:
        await turn(turns)
        assert prompts.built == built

    if max_bytes is not None:
        monkeypatch.setattr(requests, "MAX_BYTES", max_bytes)
    queued(check)


def test_taking_makes_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(queue: ReplayBodies, prompts: Counting) -> None:
        for _ in range(9):
            await turn(1)
            queue.take()
            await turn(1)
        assert prompts.built == 10

    monkeypatch.setattr(requests, "MAX_BYTES", 1)
    queued(check)


@queueing()
async def test_what_is_taken_is_built_again_ahead(queue: ReplayBodies, prompts: Counting) -> None:
    await turn(300)
    for _ in range(10):
        queue.take()
    await turn(300)
    assert prompts.built == requests.MAX_BODIES + 10


@queueing()
async def test_a_closed_queue_builds_nothing_more(queue: ReplayBodies, prompts: Counting) -> None:
    queue.close()
    await turn(9)
    assert prompts.built == 0


# Prompts: exactly as long as recorded, the same every time, with the prefixes of the trace.


def planned(
    tokens: int, *, number: int = 0, hash_ids: tuple[int, ...] = (), text: str | None = None
) -> PlannedRequest:
    return PlannedRequest(number, 0, tokens, 1, hash_ids, text)


def words(prompt: str) -> list[str]:
    return prompt.split(" ")


@given(
    tokens=st.integers(1, 3 * BLOCK_WORDS),
    ids=st.lists(st.integers(-5, 5), max_size=4),
    number=st.integers(0, 10**9),
)
def test_a_prompt_has_exactly_the_words_asked(tokens: int, ids: list[int], number: int) -> None:
    prompt = PromptBuilder(0).build(planned(tokens, number=number, hash_ids=tuple(ids)))
    assert len(words(prompt)) == tokens
    assert all(word[0] == "t" and word[1:].isdigit() for word in words(prompt))
    assert len(tokenise(prompt)) == tokens


def test_a_prompt_of_100_000_tokens_is_exact_too() -> None:
    assert len(words(PromptBuilder(0).build(planned(100_000)))) == 100_000


def test_the_words_are_the_same_on_every_machine_and_in_every_version() -> None:
    builder = PromptBuilder(7)
    assert builder.build(planned(4, number=3)) == "t10062 t3335 t3417 t3586"
    assert builder.build(planned(4, hash_ids=(46,))) == "t1552 t3179 t12919 t752"


def test_order_and_memory_do_not_change_a_prompt() -> None:
    requests = [planned(1500, number=i, hash_ids=(i % 3, 7, i)) for i in range(9)]
    fresh = [PromptBuilder(1).build(request) for request in requests]
    forgetful = PromptBuilder(1, cached_blocks=1)
    assert [forgetful.build(request) for request in reversed(requests)] == fresh[::-1]


def test_the_blocks_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(key: str) -> str:
        made.append(key)
        return " ".join(BLOCK_WORDS * ["t1"])

    monkeypatch.setattr("balanceroute.proxy.lab.replay.requests._words", counted)
    builder = PromptBuilder(0, cached_blocks=2)
    for block in (1, 2, 1, 3, 1, 2):
        builder.build(planned(512, hash_ids=(block,)))
    assert made == ["0/block/1", "0/block/2", "0/block/3", "0/block/2"]


def test_equal_ids_give_equal_blocks_and_other_ids_others() -> None:
    builder = PromptBuilder(0)
    first = words(builder.build(planned(1300, number=1, hash_ids=(5, 6, 7))))
    second = words(builder.build(planned(1400, number=2, hash_ids=(5, 6, 8))))
    assert first[:1024] == second[:1024]
    assert first[1024:1300] != second[1024:1300]


def test_a_short_last_block_is_the_beginning_of_the_whole_block() -> None:
    builder = PromptBuilder(0)
    short = words(builder.build(planned(600, hash_ids=(5, 6))))
    whole = words(builder.build(planned(1024, hash_ids=(5, 6))))
    assert whole[:600] == short


def test_without_ids_every_request_has_words_of_its_own() -> None:
    builder = PromptBuilder(0)
    first, second = (words(builder.build(planned(600, number=number))) for number in (1, 2))
    assert first[:10] != second[:10]
    assert first[:88] != first[512:]


def test_a_prompt_longer_than_its_ids_goes_on_with_words_of_its_own() -> None:
    builder = PromptBuilder(0)
    first, second = (
        words(builder.build(planned(1000, number=number, hash_ids=(5,)))) for number in (1, 2)
    )
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


@pytest.mark.parametrize("hash_ids", [(), (5,)])
def test_another_seed_gives_other_words(hash_ids: tuple[int, ...]) -> None:
    request = planned(9, hash_ids=hash_ids)
    assert PromptBuilder(0).build(request) != PromptBuilder(1).build(request)


def test_a_given_text_is_the_prompt() -> None:
    assert PromptBuilder(0).build(planned(9, text="What is love?")) == "What is love?"


# ShareGPT files: the first question and the length of its answer.


HUMAN = {"from": "human", "value": "What is a router?"}
GPT = {"from": "gpt", "value": "A box."}


def written(folder: Path, content: object) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_first_exchange_of_each_conversation_is_read(tmp_path: Path) -> None:
    more = [HUMAN, GPT, {"from": "human", "value": "Why?"}]
    only_asked = [HUMAN]
    backwards = [GPT, HUMAN]
    unanswered = [HUMAN, {"from": "gpt", "value": ""}]
    conversations = [more, only_asked, backwards, unanswered, [], [HUMAN, GPT]]
    path = written(tmp_path, [{"id": "a", "conversations": turns} for turns in conversations])
    assert read_exchanges(path) == 2 * [SharedExchange("What is a router?", 5, 2)]


def test_a_length_is_a_token_for_every_four_bytes_rounded_up(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "éé"}, {"from": "gpt", "value": "ééx"}]
    (exchange,) = read_exchanges(written(tmp_path, [{"conversations": turns}]))
    assert exchange == SharedExchange("éé", 1, 2)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a\ud800b"}, {"from": "gpt", "value": "\ud800"}]
    (exchange,) = read_exchanges(written(tmp_path, [{"conversations": turns}]))
    assert exchange == SharedExchange("a?b", 1, 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        (10_000 * "[", "not valid JSON"),
        ({}, "not a JSON list of conversations"),
        ([], "no conversation begins with a question"),
        ([{"conversations": [HUMAN]}], "no conversation begins with a question"),
        ([7], "entry 0 has no list of conversations"),
        ([{"conversations": []}, {"turns": []}], "entry 1 has no list of conversations"),
        ([{"conversations": ["hello"]}], "entry 0 has no list of conversations"),
        ([{"conversations": [HUMAN, {"from": "gpt"}]}], "entry 0 has a turn without a text"),
    ],
)
def test_another_file_is_refused_with_the_reason(
    content: object, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=reason) as error:
        read_exchanges(path)
    assert str(path) in str(error.value)


def test_requests_take_the_exchanges_in_turn_and_keep_their_arrival() -> None:
    exchanges = [SharedExchange("one", 1, 10), SharedExchange("two", 2, 20)]
    requests = [PlannedRequest(number, 7 * number, 500, 50, (1,)) for number in (1, 2, 4)]
    assert with_exchanges(requests, exchanges) == [
        PlannedRequest(1, 7, 2, 20, (), "two"),
        PlannedRequest(2, 14, 1, 10, (), "one"),
        PlannedRequest(4, 28, 1, 10, (), "one"),
    ]


def test_limits_cut_the_text_and_the_answer() -> None:
    exchange = SharedExchange("abcdefgéé", 3, 99)
    (request,) = with_exchanges(
        [PlannedRequest(0, 0, 5, 5)], [exchange], max_prompt_tokens=2, max_output_tokens=9
    )
    # The eighth byte is half of a character.
    assert (request.text, request.prompt_tokens, request.output_tokens) == ("abcdefg", 2, 9)


# Which requests are sent, and when.


TRACE = [
    TraceRequest(0, 100, 10, (1, 2)),
    TraceRequest(1_000_000_000, 0, 20),
    TraceRequest(2_000_000_000, 300, 0),  # It failed when it was recorded.
    TraceRequest(4_000_000_000, 400, 40),
]


def test_the_whole_trace_is_taken_with_numbers_of_the_trace() -> None:
    assert plan(TRACE) == [
        PlannedRequest(0, 0, 100, 10, (1, 2)),
        PlannedRequest(1, 1_000_000_000, 1, 20),
        PlannedRequest(3, 4_000_000_000, 400, 40),
    ]


def test_skipped_requests_do_not_renumber_the_others() -> None:
    assert [request.number for request in plan(TRACE, skip=1, count=2)] == [1]
    assert [request.number for request in plan(TRACE, skip=1, count=3)] == [1, 3]


def test_long_prompts_and_answers_are_cut() -> None:
    chosen = plan(TRACE, max_prompt_tokens=100, max_output_tokens=20)
    assert [request.prompt_tokens for request in chosen] == [100, 1, 100]
    assert [request.output_tokens for request in chosen] == [10, 20, 20]


@pytest.mark.parametrize(("skip", "count"), [(4, None), (9, None), (2, 1)])
def test_nothing_to_send_is_an_error(skip: int, count: int | None) -> None:
    with pytest.raises(ConfigError, match="no request to send: the trace has 4"):
        plan(TRACE, skip=skip, count=count)


def test_times_start_at_the_first_request_sent() -> None:
    assert due_s(plan(TRACE, skip=1), speed=1.0) == [0.0, 3.0]


def test_speed_divides_the_times() -> None:
    assert due_s(plan(TRACE), speed=4.0) == [0.0, 0.25, 1.0]
