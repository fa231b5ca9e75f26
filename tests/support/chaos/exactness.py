"""Whether the proxy's answers are those of one engine, byte for byte, when nothing goes wrong."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.support.chaos.clients import Client, ask_all
from tests.support.chaos.expectation import Expectation, TextOracle, comparable
from tests.support.chaos.judge import is_refusal, refusal_is_wrong
from tests.support.chaos.requests import (
    ClientRequest,
    RequestMix,
    draw_request,
    may_end_with_the_prefill,
)
from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.request.leg_settings import FirstTokenFrom, Resume
from balanceroute.proxy.live.telemetry.record import RequestRecord

_MODEL = "emulated"
_GAP_S = 0.02
# Of four seeds in a row, those whose engines have tokens that end within a character, and the one
# with a reasoning parser.
_ODD = 2
_REASONING = 3
_BATCH_LIMIT = 64


@dataclass(slots=True)
class Comparison:
    """What came of many requests."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)  # How many had which status.
    identical: int = 0  # Whose answers were the same bytes.
    # Whose answers were the same for each choice, in another order or cut otherwise.
    interleaved: int = 0
    early: int = 0  # Whose first token came from the prefiller.
    differences: list[str] = field(default_factory=list)  # What was wrong, a line each.


def compare(
    seed: int,
    *,
    requests: int,
    connector: str = "nixl",
    policy: str = "br-h",
    resume: Resume = Resume.OFF,
    first_token: FirstTokenFrom = FirstTokenFrom.DECODE,
) -> Comparison:
    """Send drawn requests through a proxy and to an engine, and compare the answers.

    Ids are made to agree. Times and the engines' fingerprints are left out of the comparison. Choices
    that share a stream are compared one by one: their order among each other is a matter of time. Of a
    stream whose first token came from the prefiller, and whose engines put several tokens into one
    event, the text counts.
    """
    engines = EmulationSettings(
        ranks=4,
        batch_limit=_BATCH_LIMIT,
        step_base_ns=10_000_000,
        connector=connector,
        model=_MODEL,
        mean_output_tokens=20.0,
        prompt_tokens_details=seed % 2 == 1,
        merged_outputs=0.1 if seed % 2 else 0.0,
        partial_utf8=0.1 if seed % 4 >= _ODD else 0.0,
        reasoning_parser=seed % 4 == _REASONING,
    )
    flags = {
        "policy": policy,
        "batch": _BATCH_LIMIT,
        "resume": resume.value,
        "first_token": first_token.value,
    }
    return run(
        lambda loop: _compare(loop, WorldSettings(engines, flags), seed, requests), seed=seed
    )


async def _compare(
    loop: VirtualLoop, settings: WorldSettings, seed: int, requests: int
) -> Comparison:
    rng = random.Random(f"exactness {seed}")
    world = World(settings, loop, rng)
    await world.start()
    oracle = TextOracle(settings.engines)
    await oracle.start()
    await asyncio.sleep(2.0)  # Some prefillers take requests only once they are known.
    mix = RequestMix(_MODEL)
    comparison = Comparison(requests)
    drawn = [draw_request(rng, number, mix) for number in range(requests)]
    clients = await ask_all(world, drawn, gap_s=_GAP_S)
    ended = {record.request_id: record for record in world.ended}
    for request, client in zip(drawn, clients, strict=True):
        await _judge(request, client, oracle, comparison, ended.get(request.request_id))
    await oracle.close()
    await world.close()
    return comparison


async def _judge(
    request: ClientRequest,
    client: Client,
    oracle: TextOracle,
    comparison: Comparison,
    record: RequestRecord | None,
) -> None:
    received = client.answers[0]
    comparison.statuses[received.status] += 1
    if request.forbidden:
        if received.status != 400:
            comparison.differences.append(f"{request.request_id}: {received.status} for 400")
        return
    early = record is not None and record.early_first_token
    comparison.early += early
    answer = await oracle.answer(request, seed=None if record is None else record.seed)
    body = bytes(received.body)
    if received.status != answer.status:
        wrong = f"{received.status} for {answer.status}"
    elif comparable(body, request.request_id) == comparable(answer.body, request.request_id):
        comparison.identical += 1
        return
    elif received.status >= 400 and is_refusal(request, body, answer.body):
        wrong = "; ".join(refusal_is_wrong(request, received))
    else:
        reworded = early and oracle.merges
        wrong = Expectation(request, answer, reworded=reworded).differs(body)
    if wrong and may_end_with_the_prefill(request):
        ended = await oracle.answer(request, as_prefiller=True)
        wrong = wrong if Expectation(request, ended).differs(body) else ""
    if wrong:
        comparison.differences.append(f"{request.request_id}: {wrong}")
    else:
        comparison.interleaved += 1
