"""What a relay tells of its requests is what the core of a new scheduler process adopts."""

import random

import pytest
from msgspec import structs
from tests.core.test_adoption import RestartingMachine, walk
from tests.core.test_scheduler_machine import random_config, random_policy_settings
from tests.core.test_standing import Followed

from balanceroute.proxy.core.adoption import adopted
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId, Ticket
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.processes.adoption import adoption, live_message
from balanceroute.proxy.live.processes.frames import encode, for_scheduler
from balanceroute.proxy.live.processes.from_relay import Arrival, Live
from balanceroute.proxy.live.telemetry.record import RequestRecord

RECORD = RequestRecord("r-1", "/v1/completions", 0, 0.0)


def arrival(number: RequestId, sequences: int) -> Arrival:
    shape = Shape(Api.COMPLETIONS, "m", True, sequences, "", None, 70, 0, 16)
    return Arrival(number, shape, None, 0, None, "", (), RECORD)


class Relay(Followed):
    """Tells of each request over the protocol."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.phases: set[str] = set()

    def adopted(self, request: Request) -> Request:
        number, slots = request.request, request.ticket.slots
        before = request.emitted_before * slots
        here = self.scheduler.emitted(number) if request.started else 0
        told = live_message(
            arrival(number, slots),
            self.standings[number],
            engine_id="r-1",
            emitted=before + here,
            emitted_before=before,
            pulls=True,
        )
        (live,) = for_scheduler().feed(bytes(encode([told])))
        assert isinstance(live, Live)
        assert live == told
        self.phases.add(live.phase)
        return adopted(adoption(live, number, request.ticket), self.scheduler.config)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_on_the_way(seed: int) -> None:
    rng = random.Random(f"live {seed}")
    machine = RestartingMachine("br-h")
    machine.build(random_config(rng), random_policy_settings(rng))
    relay = Relay(machine.scheduler)
    machine.scheduler = relay  # type: ignore[assignment]
    for _ in range(150):
        walk(machine, rng)
    machine.teardown()
    assert relay.phases == {"queued", "prefilling", "pooled", "admitted", "decoding"}


@pytest.mark.parametrize("phase", ["prefilling", "admitted", "decoding"])
def test_a_request_that_is_with_nobody_is_refused(phase: str) -> None:
    of_one = arrival(RequestId(7), 1)
    live = Live(
        *(of_one, "r-1", "pooled", 10, 0, 0, True, None, 0, None, False, None, 0, None),
        *(False, 0, tuple[PrefillerId](), tuple[RankId]()),
    )
    assert adoption(live, RequestId(9), Ticket(10)).request == 9
    with pytest.raises(LifecycleError, match=f"request 7 of a relay is {phase} nowhere"):
        adoption(structs.replace(live, phase=phase), RequestId(9), Ticket(10))
