"""One run in which clients speak HTTP/3, over links that lose, repeat, delay and corrupt packets; see `trial`.

The proxy and its engines are those of any run, and so is the judge. What HTTP/1.1 alone has (pipelining,
1.0, clients that read slowly) is left out of the plan. TLS draws what it needs by itself, so a seed repeats
what is asked and what fails, and not each packet.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.chaos.clients import (
    Client,
    ClientEnding,
    ClientPhase,
    Received,
    Visit,
)
from tests.support.chaos.log_capture import LogCapture
from tests.support.chaos.plan import ChaosPlan, draw_plan
from tests.support.chaos.requests import ClientRequest
from tests.support.chaos.trial import Trial, TrialReport, run_trial
from tests.support.virtual.addresses import Address
from tests.support.virtual.datagrams import (
    DatagramNetwork,
    ThinLinkSettings,
    VirtualDatagrams,
)
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.live.http3_listener import (
    Http3Listener,
)
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, WireError
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Calling

_HOST = "127.0.0.1"
_CONNECTIONS = 4
_LATE_S = 0.05


def run_seed_over_http3(seed: int, *, requests: int, cert: Path, key: Path) -> TrialReport:
    """Carry a seed's plan out over HTTP/3 and return what came of it; see `Http3Trial`."""
    plan = draw_plan(seed, requests=requests)
    plan = replace(plan, visits=tuple(map(_over_http3, plan.visits)))
    return run_trial(
        plan, lambda loop, report, log: Http3Trial(plan, loop, report, log, cert=cert, key=key)
    )


def _over_http3(visit: Visit) -> Visit:
    departure = visit.departure
    if departure is not None and departure.phase is ClientPhase.SENDING:
        departure = replace(departure, phase=ClientPhase.AFTER)
    return Visit(visit.start_s, visit.requests, departure=departure)


class Http3Trial(Trial):
    """One run.

    Args:
        cert: The proxy's certificate, of one length in all runs: see `make_certificate`.
        key: Its key.
    """

    def __init__(
        self,
        plan: ChaosPlan,
        loop: VirtualLoop,
        report: TrialReport,
        log: LogCapture,
        *,
        cert: Path,
        key: Path,
    ) -> None:
        super().__init__(plan, loop, report, log)
        rng = self._links = random.Random(f"HTTP/3 {plan.seed}")
        link = ThinLinkSettings(
            bits_per_s=rng.choice([2e6, 20e6]),
            delay_s=rng.choice([0.0005, 0.02]),
            loss=rng.choice([0.0, 0.01, 0.05]),
        )
        self._network = loop.datagrams = BadDatagrams(loop, rng, up=link, down=link)
        order = rng.choice([*STREAM_ORDERS])
        # Few streams at a time, so that requests wait for their turn.
        settings = Http3Settings(http3_order=order, http3_streams=rng.choice([4, 100]))
        self._listener = Http3Listener(settings, cert, key)
        self._trust = Trust(str(cert))
        self._callers: list[Http3Endpoint] = []
        self._listening: asyncio.Task[None]
        self._has_bad_wires = True

    def _begin_more(self) -> None:
        self._listening = self._loop.create_task(self._listen())

    async def _end_more(self) -> None:
        self._report.counters.update(self._network.done)
        self._report.counters["datagrams lost"] += self._network.up.lost + self._network.down.lost
        # Else the proxy would not notice that clients have gone.
        self._network.heal()

    async def _listen(self) -> None:
        (front,) = self._world.fronts
        await self._listener.start(front.server.service, front.server.addresses)
        self._callers = [
            Http3Endpoint(_HOST, front.server.port, trust=self._trust) for _ in range(_CONNECTIONS)
        ]

    async def _visit(self, visit: Visit) -> None:
        await self._listening
        await self._until(visit.start_s)
        client = Http3Client(visit, on_left=self._left)
        self._clients.append(client)
        for request in visit.requests:
            self._by_id.setdefault(request.request_id, client)
        client.ask(self._links.choice(self._callers))
        await client.over.wait()

    async def _await_end(self, visits: list[asyncio.Task[None]]) -> None:
        await super()._await_end(visits)
        for caller in self._callers:
            caller.close()

    async def _judge_answers(self) -> None:
        await super()._judge_answers()
        self._listener.close()


class BadDatagrams(DatagramNetwork):
    """A network that also repeats, delays and corrupts datagrams.

    Attributes:
        done: How often it did what.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        up: ThinLinkSettings,
        down: ThinLinkSettings,
    ) -> None:
        super().__init__(loop, rng, up=up, down=down)
        self.done = {"datagrams corrupted": 0, "datagrams delayed": 0, "datagrams repeated": 0}
        self._rng = rng
        self._share = rng.choice([0.0, 0.02, 0.1])

    def carry(self, data: bytes, sender: VirtualDatagrams, to: Address) -> None:
        """Send a datagram on its way, or not as it is."""
        if self._rng.random() >= self._share:
            super().carry(data, sender, to)
            return
        match self._rng.randrange(3):
            case 0:
                self._count("repeated")
                super().carry(data, sender, to)
                super().carry(data, sender, to)
            case 1:
                self._count("delayed")
                later_s = self._rng.uniform(0.0, _LATE_S)
                self.loop.call_later(later_s, super().carry, data, sender, to)
            case _:
                self._count("corrupted")
                super().carry(self._corrupted(data), sender, to)

    def heal(self) -> None:
        """Do nothing of it any more, and lose nothing."""
        self._share = 0.0
        for link in (self.up, self.down):
            link.heal()

    def _count(self, what: str) -> None:
        self.done[f"datagrams {what}"] += 1

    def _corrupted(self, data: bytes) -> bytes:
        place = self._rng.randrange(len(data))
        if self._rng.random() < 0.3:
            return data[:place]
        return data[:place] + bytes([data[place] ^ 1 << self._rng.randrange(8)]) + data[place + 1 :]


class Http3Client(Client):
    """One visit: each request is a stream of a connection that other visits use too."""

    def __init__(self, visit: Visit, *, on_left: Callable[[Client], None]) -> None:
        super().__init__(visit, on_left=on_left)
        self._calls: list[Calling] = []
        self._open = len(visit.requests)

    @property
    def comes_late(self) -> bool:
        """Always, as packets are lost and sent again."""
        return True

    def ask(self, caller: Http3Endpoint) -> None:
        departure = self.visit.departure
        for request, answer in zip(self.visit.requests, self.answers, strict=True):
            self.sent += 1
            path, headers = request.path.encode(), _headers(request)
            taker = _Taker(self, answer)
            self._calls.append(caller.request(b"POST", path, headers, request.body, taker))
        if departure is not None and departure.phase is ClientPhase.AFTER:
            self.leave_soon()

    def leave(self) -> None:
        """Give every answer up that is not over."""
        if self.over.is_set() or self.left:
            return
        self.left = True
        for call, answer in zip(self._calls, self.answers, strict=True):
            if answer.ending is ClientEnding.OPEN:
                call.abort()
                answer.left = True
                self.ended(answer, ClientEnding.CUT if answer.status else ClientEnding.UNANSWERED)
        self._on_left(self)

    def came(self, answer: Received) -> None:
        """React to what came of an answer."""
        if answer is self.answers[0]:
            self._react(answer)

    def ended(self, answer: Received, ending: ClientEnding) -> None:
        answer.ending, answer.ended_s = ending, self._loop.time()
        self._open -= 1
        if not self._open:
            for timer in self._timers:
                timer.cancel()
            self.over.set()


class _Taker:
    """Takes one answer."""

    def __init__(self, client: Http3Client, answer: Received) -> None:
        self._client = client
        self._answer = answer

    def on_head(self, status: int, headers: Headers) -> None:
        self._answer.status, self._answer.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._answer.body += data
        self._client.came(self._answer)

    def on_end(self) -> None:
        self._client.ended(self._answer, ClientEnding.COMPLETE)

    def on_error(self, error: WireError) -> None:
        del error
        self._client.ended(
            self._answer, ClientEnding.CUT if self._answer.status else ClientEnding.UNANSWERED
        )


def _headers(request: ClientRequest) -> Headers:
    headers = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request.request_id.encode()),
    ]
    if request.key:
        headers.append((b"authorization", b"Bearer %b" % request.key.encode()))
    if request.deadline_ms is not None:
        headers.append((b"x-request-deadline-ms", b"%d" % request.deadline_ms))
    return headers
