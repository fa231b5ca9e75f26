"""What a request emitted on earlier bindings: whether another rank can go on from it."""

import json

import pytest

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.openai.stream_reader import RepeatedText
from balanceroute.proxy.live.request.client_answer import Emitted
from balanceroute.proxy.live.request.leg_settings import Resume

OPENING = (
    b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,'
    b'"prompt_token_ids":[1,2],"token_ids":[]}]}\n\n'
)
TOKEN = (
    b'data: {"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"token_ids":[7]}]}\n\n'
)


@pytest.mark.parametrize(("limit", "goes_on"), [(2, False), (3, True), (None, True)])
def test_an_answer_that_has_reached_its_limit_is_not_continued(
    limit: int | None, goes_on: bool
) -> None:
    values = {"prompt": "a", "stream": True, "temperature": 0, "max_tokens": limit}
    body = RequestBody(json.dumps(values).encode())
    shape = read_shape(Api.COMPLETIONS, body, max_sequences=8)
    emitted = Emitted()
    ids = emitted.ids_to_keep(
        shape, body, Resume.EXACT, RepeatedText(), parses=False, prompt_tokens=2
    )
    assert ids is not None
    ids.note(OPENING, json.loads(OPENING[6:]))
    for _ in range(2):
        ids.take(TOKEN)
    assert ids.count == 2
    assert emitted.takes(ids, shape) is goes_on
