"""Bodies: what a request asks for, and that building them ahead changes nothing but the time."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from tests.support.played import played_by

from balanceroute.proxy.lab.replay import requests
from balanceroute.proxy.lab.replay.requests import (
    PlannedRequest,
    PromptBuilder,
    ReplayApi,
    ReplayBodies,
    ReplayLengths,
    request_body,
)

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
