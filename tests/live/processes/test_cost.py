"""What several processes cost beside one: opcodes that all of them execute for a request."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.opcodes import counted, share

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 1, "ignore_eos": True}
REQUESTS = 16
# They depend on the time that passes, which is longer with delays between processes.
WATCHING = ("live/engines/", "live/processes/relay_sweep.py", "live/scheduling/sweep")


def opcodes_of(play: "Play", *, relays: int, stream: bool) -> float:
    opcodes = Counter[str]()

    async def scenario(site: "Site") -> None:
        for _ in range(4):  # What is made once, in each relay.
            await site.post("/v1/completions", BODY | {"stream": stream})
        with counted(opcodes):
            for _ in range(REQUESTS):
                await site.post("/v1/completions", BODY | {"stream": stream})

    # Whether probes fall into the time that is counted says nothing of a request.
    play(scenario, relays=relays, flags={"health_interval_s": 600.0})
    for name in [name for name in opcodes if name.startswith(WATCHING)]:
        del opcodes[name]
    return share(opcodes) / REQUESTS


# One at a time, so that each message is a frame of its own: with many in flight it is a third less.
@pytest.mark.parametrize(("stream", "more"), [(False, 2_900), (True, 3_400)])
def test_several_processes_execute_few_opcodes_more(
    play: "Play", stream: bool, more: float
) -> None:
    one = opcodes_of(play, relays=0, stream=stream)
    assert opcodes_of(play, relays=2, stream=stream) - one < more
