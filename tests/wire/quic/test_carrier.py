"""The timer of a connection."""

import asyncio
import math
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from tests.support.virtual.loop import START_S, VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.wire.quic.connection import Carrier

if TYPE_CHECKING:
    from balanceroute.proxy.wire.quic.connection import OrderedConnection

_STEP_S = math.ulp(START_S)
SENT_S = START_S + _STEP_S
# Behind the first sum the clock has no room for the half, behind the difference neither.
DELAY_S = 100_001.5 * _STEP_S


class OnePacket:
    """What a connection does that waits for one packet to be lost, with the arithmetic of aioquic."""

    def __init__(self) -> None:
        self.asked = 0
        self.lost = False

    def get_timer(self) -> float | None:
        return None if self.lost else SENT_S + DELAY_S

    def handle_timer(self, now: float) -> None:
        self.asked += 1
        assert self.asked < 1_000, "the timer is set for the same time again and again"
        self.lost = now - DELAY_S >= SENT_S

    def next_event(self) -> None:
        return None

    def datagrams_to_send(self, now: float) -> list[Any]:
        del now
        return []


class Nobody:
    """Whom the connection is for."""

    def on_event(self, event: object) -> None: ...

    def on_progress(self) -> None: ...


def test_a_timer_whose_time_is_rounded_down_fires_once() -> None:
    assert SENT_S + DELAY_S - DELAY_S < SENT_S
    packet = OnePacket()

    async def main(loop: VirtualLoop) -> None:
        carrier = Carrier(cast("OrderedConnection", packet), cast("Any", None), loop)
        carrier.carried = Nobody()
        carrier.send_soon()
        await asyncio.sleep(1.0)

    run(main, seed=0)
    assert packet.lost
    assert packet.asked == 1
