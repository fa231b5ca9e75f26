"""Bodies of clients whose texts and numbers no message between processes can have as they are."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 20, "ignore_eos": True}
HALF = "\ud800"
HUGE = 10**30


@pytest.mark.parametrize(
    "changes",
    [
        {"model": HALF},
        {"model": "tiny", HALF: 1},
        {"user": HALF},
        {"prompt": HALF},
        {"stop": [HALF]},
        {"cache_salt": HALF},
        {"max_tokens": HUGE},
        {"min_tokens": HUGE},
        {"n": HUGE},
        {"seed": HUGE},
        {"priority": HUGE},
        {"prompt": [HUGE]},
        {"previous_response_id": HALF},
        {"stream_options": {HALF: HALF}, "stream": True},
    ],
    ids=str,
)
def test_it_is_answered_as_by_one_process_and_nobody_else_notices(
    changes: dict[str, Any], play: "Play"
) -> None:
    statuses = []

    async def scenario(site: "Site") -> None:
        others = [site.send(COMPLETIONS, BODY) for _ in range(2)]
        strange = site.send(COMPLETIONS, BODY | changes)
        others += [site.send(COMPLETIONS, BODY) for _ in range(2)]
        for one in (strange, *others):
            await one.end()
        statuses.append(strange.status)
        assert [one.status for one in others] == [200] * 4
        await site.until(lambda: len(site.world.ended) == 5)

    play(scenario, relays=0)
    play(scenario, relays=1)
    assert statuses[0] == statuses[1] != 0
