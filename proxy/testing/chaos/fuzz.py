"""Hostile requests against the whole proxy in virtual time, and a canary request after each.

What must hold: no answer of 500 or more that the proxy made itself, every refusal in the API's shape,
and the next honest request answered as one engine answers it.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.testing.chaos.answer_reader import AnswerReader, Ending, Received
from balanceroute.proxy.testing.chaos.clients import Client, Visit
from balanceroute.proxy.testing.chaos.fuzz_cases import FuzzCase, draw_case
from balanceroute.proxy.testing.chaos.log_keeper import violations_of
from balanceroute.proxy.testing.chaos.oracle import Oracle, comparable
from balanceroute.proxy.testing.chaos.requests import ClientRequest, RequestMix, draw_request
from balanceroute.proxy.testing.chaos.world import World, WorldSettings
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run
from balanceroute.proxy.wire.messages import MalformedError
from balanceroute.topologies import CONNECTORS

_CANARIES = 24
# A case whose answer goes on is left by its client after this time.
_PATIENCE_S = 0.2
_QUIET_S = 12.0
# Not of the proxy's own making: it says that it does not do what was asked.
_HONEST = frozenset({501, 505})
_LONGEST_S = 1e9
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True)
class FuzzReport:
    """What came of the cases of one seed.

    Attributes:
        statuses: What they were answered; 0 if nothing.
        violations: What must not be.
    """

    seed: int
    cases: int
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def fuzz(seed: int, *, cases: int) -> FuzzReport:
    """Send the cases of a seed, one after another, each with a canary behind it.

    The seed also chooses the connector.
    """
    report = FuzzReport(seed, cases)
    report.violations += violations_of(
        lambda _: run(lambda loop: _Run(loop, report).run(), seed=seed, limit_s=_LONGEST_S)
    )
    return report


class _Run:
    """The cases of one seed."""

    def __init__(self, loop: VirtualLoop, report: FuzzReport) -> None:
        self._loop = loop
        self._report = report
        self._rng = random.Random(f"fuzz {report.seed}")
        connectors = list(CONNECTORS)
        self._settings = EmulationSettings(
            ranks=2,
            batch_limit=64,
            step_base_ns=1_000_000,
            prefill_base_ns=200_000,
            connector=connectors[report.seed % len(connectors)],
            mean_output_tokens=8.0,
        )

    async def run(self) -> None:
        """Send everything."""
        loop, rng, report = self._loop, self._rng, self._report
        world = World(WorldSettings(self._settings, {"policy": "br-h", "batch": 64}), loop, rng)
        await world.start()
        await asyncio.sleep(2.0)  # Some prefillers take requests only once they are known.
        canaries = await self._canaries()
        for number in range(report.cases):
            case = draw_case(rng, number)
            report.kinds.update(case.kinds)
            self._judge(number, case, await self._send(case, world.port))
            request, expected = canaries[number % len(canaries)]
            await self._check_canary(world, number, case, request, expected)
        await asyncio.sleep(_QUIET_S)
        if not world.proxy.deployment.driver.idle:
            report.violations.append(f"held: {list(world.proxy.deployment.driver.sessions)}")
        world.scheduler.check()
        await world.close()

    async def _send(self, case: FuzzCase, port: int) -> "_Probe":
        probe = _Probe(case, self._loop)
        await self._loop.create_connection(lambda: probe, "127.0.0.1", port)
        await probe.run()
        return probe

    async def _canaries(self) -> list[tuple[ClientRequest, bytes]]:
        """Return honest requests with their answers."""
        oracle = Oracle(self._settings)
        await oracle.start()
        mix = RequestMix(
            self._settings.model, mean_prompt_words=5.0, max_tokens=4, big=0.0, odd=0.0
        )
        found: list[tuple[ClientRequest, bytes]] = []
        number = 10_000_000  # No case has one of these.
        while len(found) < _CANARIES:
            number += 1
            request = draw_request(self._rng, number % 1_000, mix)
            # Choices that share a stream come in any order.
            limits = {"max_tokens", "max_output_tokens"}
            if limits & request.values.keys() and not _has_choices(request.values):
                answer = await oracle.answer(request)
                found.append((request, comparable(answer.body, request.request_id)))
        await oracle.close()
        return found

    async def _check_canary(
        self, world: World, number: int, case: FuzzCase, request: ClientRequest, expected: bytes
    ) -> None:
        client = Client(Visit(0.0, (request,), close=True), on_left=lambda _: None)
        await self._loop.create_connection(lambda: client, "127.0.0.1", world.port)
        try:
            await asyncio.wait_for(client.over.wait(), 30.0)
        except TimeoutError:
            self._violate(number, case, f"the canary {request.body[:200]!r} hangs")
            return
        received = client.answers[0]
        got = comparable(bytes(received.body), request.request_id)
        if received.status != 200 or got != expected:
            self._violate(number, case, f"the canary got {received.status} {got[:300]!r}")

    def _judge(self, number: int, case: FuzzCase, probe: "_Probe") -> None:
        if probe.malformed:
            self._violate(number, case, f"an answer that is no HTTP: {probe.malformed}")
        for answer in probe.answers:
            self._report.statuses[answer.status] += 1
            if answer.status >= 500 and answer.status not in _HONEST:
                self._violate(number, case, f"{answer.status} {bytes(answer.body[:300])!r}")
            if answer.status >= 400 and answer.ending is Ending.COMPLETE and not _says_why(answer):
                self._violate(
                    number, case, f"{answer.status} without a reason: {bytes(answer.body[:300])!r}"
                )

    def _violate(self, number: int, case: FuzzCase, what: str) -> None:
        self._report.violations.append(
            f"case {number} ({', '.join(case.kinds)}): {what}; sent {case.data[:600]!r}"
        )


class _Probe(asyncio.Protocol):
    """The connection of one case.

    Attributes:
        answers: What came, in order.
        malformed: Why something that came is no HTTP; empty if all is.
    """

    def __init__(self, case: FuzzCase, loop: VirtualLoop) -> None:
        self.answers = [Received()]
        self.malformed = ""
        self._case = case
        self._loop = loop
        self._reader = AnswerReader(self.answers[0])
        self._transport: asyncio.Transport | None = None
        self._over = asyncio.Event()
        self._is_head = case.data.startswith(b"HEAD ")

    async def run(self) -> None:
        """Send the case and wait for the end of its answer, for a while."""
        begin = 0
        for cut in (*self._case.cuts, len(self._case.data)):
            if self._transport is None:
                break
            self._transport.write(self._case.data[begin:cut])
            begin = cut
            await asyncio.sleep(0.0005)
        if self._case.half_closes and self._transport is not None:
            self._transport.write_eof()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _PATIENCE_S)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data.removeprefix(_CONTINUE))
        except MalformedError as error:
            self.malformed = str(error)
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.malformed:
            self._reader.end(was_reset=exc is not None)
        self._over.set()

    def _read(self, data: bytes) -> None:
        if self._is_head:  # Its answer has no body, whatever the head says.
            self.answers[0].body += data
            self._over.set()
            return
        while data:
            self._reader.feed(data)
            if self.answers[-1].ending is not Ending.COMPLETE:
                return
            data = self._reader.rest
            if "pipelined" not in self._case.kinds:
                self._over.set()
                return
            self.answers.append(Received())
            self._reader = AnswerReader(self.answers[-1])


def _has_choices(values: dict[str, Any]) -> bool:
    prompt = values.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return values.get("n", 1) > 1 or several


def _says_why(answer: Received) -> bool:
    """Return whether a refusal is a JSON object with a message."""
    try:
        value = json.loads(answer.body)
    except ValueError:
        return False
    # An engine that lacks a route says so in FastAPI's words.
    return isinstance(value, dict) and isinstance(
        value.get("error", value.get("detail")), dict | str
    )
