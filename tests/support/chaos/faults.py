"""Faults drawn from a seed: which engine does what wrong, when, and for how long.

The kinds are those of a table of what proxies in front of engines meet: refusals, resets, hangs,
stalls, lies, malformed bytes, half-open connections, short leases, crashes and restarts.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from tests.support.chaos.clients import HeldConnection
from tests.support.chaos.decision_faults import Lapse, draw_lapse
from tests.support.chaos.machine import Naming, Spoiling
from tests.support.chaos.meddler import Meddling
from tests.support.virtual.addresses import Connect, Link

from balanceroute.proxy.lab.emulate.faults import (
    AfterPull,
    ErrorForm,
    Faults,
    Frozen,
    MalformedAnswer,
    MalformedScrape,
    MalformedStream,
)
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.topologies import CONNECTORS

_NO_FAULTS = Faults()
# Costs 20 MiB for each stream that it meets.
_HUGE_SHARE = 0.02
# What a metrics page of 20 MiB costs is not worth it here.
_SCRAPES = [kind for kind in MalformedScrape if kind is not MalformedScrape.HUGE]


class Act(Enum):
    """What is done to an engine."""

    BOARD = "board"  # `changes` are faults of the emulated engine.
    KILL = "kill"
    PROCESS = "process"  # Connections and requests are gone; the URL serves on.
    SILENCE = "silence"
    LINK = "link"
    MEDDLE = "meddle"
    DRAIN = "drain"
    POLICY = "policy"
    DECISION = "decision"  # The proxy's own policy or predictor fails.
    STANDSTILL = "standstill"  # The proxy does not run for a while, and the rest goes on.
    WALL_CLOCK = "wall clock"  # It jumps, and jumps back.
    DESCRIPTORS = "descriptors"  # The proxy can open no connection.
    NAME = "name"  # Of an engine.
    DISK = "disk"  # It takes no orders of administrators.
    KEYS = "keys"  # The file of a key is bad when it is read again.
    CROWD = "crowd"  # Where engines are found there are very many, none of which serves.
    HOLD = "hold"  # Clients hold connections without a request.
    SUSPENSION = "suspension"  # Of the proxy's machine: the leases of engines go on, its loop's clock does not.


_OF_PROXY = frozenset(
    {
        Act.DECISION,
        Act.STANDSTILL,
        Act.WALL_CLOCK,
        Act.SUSPENSION,
        Act.DESCRIPTORS,
        Act.DISK,
        Act.KEYS,
        Act.CROWD,
        Act.HOLD,
    }
)


CLIENTS = "127.0.0.1"
"""The address of all clients."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault of one engine."""

    kind: str
    act: Act
    role: Role  # Of the engine.
    engine: int
    start_s: float  # When it begins, from the beginning of the run.
    end_s: float  # When it ends.
    changes: Mapping[str, Any] = field(default_factory=dict)
    link: Link | None = None
    meddling: Meddling | None = None
    policy: str = ""
    lapse: Lapse | None = None
    jump_s: float = 0.0  # By how much a clock jumps.
    version: str = ""  # The one with which a killed engine comes back; empty for its own.
    naming: Naming = Naming.WELL  # What a resolver answers for the engine's name.
    spoiling: Spoiling = Spoiling.EMPTY  # What is wrong with the file of a key.
    crowd: int = 0  # How many engines are found at once.
    held_with: HeldConnection = HeldConnection.HALF_HEAD  # What connections are held with.

    @property
    def held_from(self) -> str:
        """The address of clients that hold connections: at times that of all clients, as behind a gateway."""
        return random.Random(f"holders {self.start_s}").choice([CLIENTS, "127.0.0.9"])

    @property
    def usual(self) -> dict[str, Any]:
        """What undoes `changes`."""
        return {name: getattr(_NO_FAULTS, name) for name in self.changes}

    @property
    def name(self) -> str:
        """The kind with whose it is."""
        return f"{'proxy' if self.act in _OF_PROXY else self.role.value}: {self.kind}"


# Of all but the decisions, which are drawn apart.
_WEIGHTS = {
    Act.BOARD: 60,
    Act.KILL: 8,
    Act.PROCESS: 6,
    Act.SILENCE: 5,
    Act.LINK: 12,
    Act.MEDDLE: 10,
    Act.DRAIN: 3,
    Act.POLICY: 2,
}
Draw = Callable[[random.Random], dict[str, Any]]


def _often(name: str) -> Draw:
    return lambda rng: {name: rng.choice([0.3, 0.7, 1.0])}


def _after_tokens(name: str) -> Draw:
    return lambda rng: {name: rng.choice([0, 1, 1, 2, 3, 5, 8])}


def _always(**changes: Any) -> Draw:
    return lambda _: changes


def _after_pull(rng: random.Random) -> dict[str, Any]:
    return {
        "after_pull": rng.choice(list(AfterPull)),
        "after_pull_s": rng.choice([0.0, 0.02, 0.5]),
    }


_BOTH: tuple[tuple[str, Draw], ...] = (
    ("refuses", _always(refuse=True)),
    ("resets before headers", _often("reset_before_headers")),
    ("hangs", _always(hang=True)),
    ("is slow", lambda rng: {"delay_s": rng.uniform(0.1, 2.0)}),
    ("answers 400", _often("status_400")),
    ("answers 413", _often("status_413")),
    ("answers 429", lambda rng: {"status_429": rng.random(), "retry_after_s": 7}),
    ("answers 500", _often("status_500")),
    ("answers 503", lambda rng: {"status_503": rng.random(), "retry_after_s": 3}),
    (
        "answers malformed",
        lambda rng: {"malformed_answer": rng.choice(list(MalformedAnswer)), "trickle_s": 0.002},
    ),
    ("is unhealthy", _always(unhealthy=True)),
    ("shows odd metrics", lambda rng: {"malformed_scrape": rng.choice(_SCRAPES)}),
    ("shows metrics late", lambda rng: {"slow_scrape_s": rng.uniform(0.1, 3.0)}),
)
_PREFILL: tuple[tuple[str, Draw], ...] = (
    *_BOTH,
    ("resets after its token", _always(reset_after_tokens=1)),
    ("leaves out its parameters", _often("drop_kv_params")),
    ("gives alien parameters", _often("alien_kv_params")),
    ("ends with its one token", _often("eos_first")),
    ("keeps leases short", lambda rng: {"lease_s": rng.uniform(0.02, 0.5)}),
)
_DECODE: tuple[tuple[str, Draw], ...] = (
    *_BOTH,
    ("resets mid-stream", _after_tokens("reset_after_tokens")),
    ("ends cleanly too soon", _after_tokens("end_after_tokens")),
    ("stalls", _after_tokens("stall_after_tokens")),
    ("sends an error event", _after_tokens("error_event_after_tokens")),
    ("sends malformed events", lambda rng: {"malformed": _malformation(rng)}),
    # Twice: the KV cache is gone by then, and nothing that the proxy sees says so.
    *2 * (("fails after the pull", _after_pull),),
)
_FAILING: tuple[dict[str, Any], ...] = (
    {},
    {"status_400": 0.3},
    {"status_500": 0.3},
    {"error_event_after_tokens": 0},
    {"error_event_after_tokens": 3},
)


def _wording(rng: random.Random) -> dict[str, Any]:
    """Return a form of errors; engines refuse bad requests so, and fail in this form, too."""
    wording = {"error_form": rng.choice(list(ErrorForm)), "errors_in_200": rng.random() < 0.6}
    return wording | rng.choice(_FAILING)


# Drawn apart, for either role.
_ENDINGS: tuple[tuple[str, Draw], ...] = (
    ("is told to stop", _always(stopping=True)),
    ("is told to stop", _always(stopping=True)),
    ("loses the ends of streams", _always(lose_end=True)),
    ("keeps streams alive", lambda rng: {"keep_alive_s": rng.choice([0.01, 0.2])}),
    (
        "says nothing but comments",
        lambda rng: {"keep_alive_s": 0.5, "stall_after_tokens": rng.choice([0, 1, 3])},
    ),
    ("answers without end", _always(malformed_answer=MalformedAnswer.ENDLESS)),
    *3 * (("words its errors otherwise", _wording),),
    ("writes usage first", _always(malformed=MalformedStream.USAGE_FIRST)),
    ("leaves out the last blank line", _always(malformed=MalformedStream.NO_LAST_BLANK)),
)
_RECOMPUTED = ("hands requests back", _after_tokens("recomputed_after_tokens"))


def _malformation(rng: random.Random) -> MalformedStream:
    if rng.random() < _HUGE_SHARE:
        return MalformedStream.HUGE
    return rng.choice([kind for kind in MalformedStream if kind is not MalformedStream.HUGE])


def _links(rng: random.Random) -> tuple[str, Link]:
    """Return a bad wire and what to call it."""
    kinds: list[tuple[str, Link]] = [
        ("has a slow line", Link(bytes_per_s=rng.choice([5_000.0, 50_000.0]))),
        ("has a jittery line", Link(latency_s=0.01, jitter_s=0.2)),
        ("has its bytes split", Link(split_bytes=rng.choice([1, 2, 7, 100]))),
        ("has its segments joined", Link(coalesce_s=rng.choice([0.05, 0.3]))),
        ("has a small window", Link(window_bytes=rng.choice([100, 1_000]), latency_s=0.001)),
        (
            "has connections reset",
            Link(reset_after_download_bytes=int(rng.expovariate(1 / 2_000))),
        ),
        ("has requests reset", Link(reset_after_upload_bytes=rng.choice([0, 50, 400]))),
        (
            "has connections stall",
            Link(stall_after_download_bytes=int(rng.expovariate(1 / 2_000))),
        ),
        (
            "has connections pause",
            Link(stall_after_download_bytes=rng.choice([0, 500, 3_000]), stall_s=1.0),
        ),
        ("takes no connections", Link(connect=Connect.HANG)),
    ]
    return rng.choice(kinds)


def draw_injections(
    rng: random.Random,
    *,
    count: int,
    prefillers: int,
    decoders: int,
    connector: str,
    policies: tuple[str, ...],
    span_s: float,
) -> list[Injection]:
    """Return faults in the order of their beginnings."""
    injections = []
    for _ in range(count):
        role = Role.PREFILL if rng.random() < 0.45 else Role.DECODE
        start_s = rng.uniform(0.0, span_s)
        when = _When(
            role,
            rng.randrange(prefillers if role is Role.PREFILL else decoders),
            start_s,
            start_s + rng.choice([0.3, 1.0, 3.0]) * rng.uniform(0.5, 1.5),
        )
        injections.append(_draw(rng, when, connector, policies))
    return sorted(injections, key=lambda one: (one.start_s, one.end_s))


class _When(NamedTuple):
    """Which engine, and from when to when."""

    role: Role
    engine: int
    start_s: float
    end_s: float


def _draw(rng: random.Random, when: _When, connector: str, policies: tuple[str, ...]) -> Injection:
    act = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    match act:
        case Act.BOARD:
            table = _PREFILL if when.role is Role.PREFILL else _DECODE
            if when.role is Role.DECODE and CONNECTORS[connector].recomputes:
                table = (*table, _RECOMPUTED, _RECOMPUTED)
            kind, draw = rng.choice(table)
            changes = draw(rng)
            words = [value.value for value in changes.values() if isinstance(value, Enum)]
            return Injection(": ".join([kind, *words]), act, *when, changes=changes)
        case Act.LINK:
            kind, link = _links(rng)
            return Injection(kind, act, *when, link=link)
        case Act.MEDDLE:
            meddling = rng.choice(list(Meddling))
            return Injection(f"breaks framing: {meddling.value}", act, *when, meddling=meddling)
        case Act.POLICY:
            return Injection("policy changes", act, *when, policy=rng.choice(policies))
        case Act.KILL:
            return Injection("is killed", act, *when)
        case Act.PROCESS:
            return Injection("loses a process", act, *when)
        case Act.SILENCE:
            return Injection("goes silent", act, *when)
        case Act.DRAIN:
            return Injection("is drained", act, *when)
        case _:
            raise AssertionError("what the proxy meets itself is drawn apart")


def correlated(
    rng: random.Random, *, prefillers: int, decoders: int, start_s: float
) -> list[Injection]:
    """Return an outage of half the prefillers while a decode engine restarts."""
    outage = [
        Injection("is killed", Act.KILL, Role.PREFILL, engine, start_s, start_s + 3.0)
        for engine in range((prefillers + 1) // 2)
    ]
    victim = rng.randrange(decoders)
    outage.append(
        Injection("is killed", Act.KILL, Role.DECODE, victim, start_s + 0.2, start_s + 2.0)
    )
    return outage


def draw_endings(
    rng: random.Random, *, prefillers: int, decoders: int, span_s: float
) -> list[Injection]:
    """Return faults of how answers end, or do not, which all begin within `span_s`; often none."""
    endings = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        role = Role.PREFILL if rng.random() < 0.3 else Role.DECODE
        kind, draw = rng.choice(_ENDINGS)
        start_s, changes = rng.uniform(0.0, span_s), draw(rng)
        engine = rng.randrange(prefillers if role is Role.PREFILL else decoders)
        when = _When(role, engine, start_s, start_s + rng.uniform(0.2, 3.0))
        endings.append(Injection(kind, Act.BOARD, *when, changes=changes))
    return endings


def draw_freezes(rng: random.Random, *, decoders: int, span_s: float) -> list[Injection]:
    """Return decode engines that do nothing for a while, all within `span_s`; often none."""
    freezes = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        start_s, engine = rng.uniform(0.0, span_s), rng.randrange(decoders)
        kind, frozen, longest_s = rng.choice(
            [
                ("pauses", Frozen.ALONE, 1.2),
                ("freezes", Frozen.ALONE, 8.0),
                ("freezes", Frozen.ALONE, 8.0),
                ("holds the others up", Frozen.BARRIER, 6.0),
            ]
        )
        when = _When(Role.DECODE, engine, start_s, start_s + rng.uniform(0.2, longest_s))
        freezes.append(Injection(kind, Act.BOARD, *when, changes={"frozen": frozen}))
    return freezes


def draw_lapses(rng: random.Random, *, span_s: float) -> list[Injection]:
    """Return failures of the proxy's own decisions, which all begin within `span_s`; often none."""
    lapses = []
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        start_s, lapse = rng.uniform(0.0, span_s), draw_lapse(rng)
        when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.2, 4.0))
        lapses.append(Injection(lapse.fault.value, Act.DECISION, *when, lapse=lapse))
    return lapses


def draw_clocks(rng: random.Random, *, span_s: float) -> list[Injection]:
    """Return stops of the proxy and jumps of its wall clock, all within `span_s`; often none."""
    faults = []
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        start_s = rng.uniform(0.0, span_s)
        if rng.random() < 0.7:
            when = _When(Role.DECODE, 0, start_s, start_s + rng.choice([0.4, 2.0, 5.0, 10.0]))
            faults.append(Injection("stands still", Act.STANDSTILL, *when))
        else:
            when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.1, 3.0))
            jump_s = rng.choice([-86_400.0, -3_600.0, -1.0, 1.0, 3_600.0, 86_400.0])
            word = "back" if jump_s < 0 else "forward"
            kind = f"its wall clock jumps {word}"
            faults.append(Injection(kind, Act.WALL_CLOCK, *when, jump_s=jump_s))
    return faults


def draw_suspensions(rng: random.Random, *, span_s: float) -> list[Injection]:
    """Return suspensions of the proxy's machine, all within `span_s`; often none."""
    suspensions = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        start_s = rng.uniform(0.0, span_s)
        when = _When(Role.DECODE, 0, start_s, start_s)
        seconds = rng.choice([0.5, 2.0, 5.0, 600.0])
        suspensions.append(Injection("is suspended", Act.SUSPENSION, *when, jump_s=seconds))
    return suspensions


def draw_machine(
    rng: random.Random,
    *,
    prefillers: int,
    decoders: int,
    policies: tuple[str, ...],
    span_s: float,
    keys: bool,
) -> list[Injection]:
    """Return faults of what the proxy's machine gives it, which all begin within `span_s`; often none.

    `keys` is whether there may be some of files of keys.
    """
    faults: list[Injection] = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        role = Role.PREFILL if rng.random() < 0.4 else Role.DECODE
        engine = rng.randrange(prefillers if role is Role.PREFILL else decoders)
        naming = rng.choice([one for one in Naming if one is not Naming.WELL])
        start_s = rng.uniform(0.0, span_s)
        when = _When(role, engine, start_s, start_s + rng.uniform(0.5, 8.0))
        faults.append(Injection(naming.value, Act.NAME, *when, naming=naming))
    if rng.random() < 0.2:
        start_s = rng.uniform(0.0, span_s)
        when = _When(Role.DECODE, 0, start_s, start_s + rng.choice([0.1, 0.5, 2.0]))
        faults.append(Injection("has no descriptor left", Act.DESCRIPTORS, *when))
    if rng.random() < 0.2:
        start_s = rng.uniform(0.0, span_s)
        when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.5, 4.0))
        policy = rng.choice(policies)
        faults.append(Injection("has a full disk", Act.DISK, *when, policy=policy))
    if keys and rng.random() < 0.2:
        spoiling, start_s = rng.choice(list(Spoiling)), rng.uniform(0.0, span_s)
        when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.1, 2.0))
        kind = f"reads a bad file of a key ({spoiling.value})"
        faults.append(Injection(kind, Act.KEYS, *when, spoiling=spoiling))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        start_s = rng.uniform(0.0, span_s)
        when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.2, 5.0))
        crowd = rng.choice([3, 50, 500])
        faults.append(
            Injection("is told of engines that are not there", Act.CROWD, *when, crowd=crowd)
        )
    return faults


def draw_holders(rng: random.Random, *, span_s: float) -> list[Injection]:
    """Return crowds that hold connections without a request, at most one at a time; often none."""
    holders: list[Injection] = []
    start_s = rng.uniform(0.0, span_s)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        when = _When(Role.DECODE, 0, start_s, start_s + rng.uniform(0.5, 4.0))
        held_with = rng.choice(list(HeldConnection))
        kind = f"its connections are held ({held_with.value})"
        holders.append(Injection(kind, Act.HOLD, *when, held_with=held_with))
        start_s = when.end_s + rng.uniform(0.1, span_s)
    return holders
