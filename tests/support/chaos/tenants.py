"""Tenants in a run: what each may ask for, and whether what was refused was to be refused."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from tests.support.chaos.clients import Received, Visit
from tests.support.chaos.requests import ClientRequest

from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

_STRANGER = "key-stranger"
_SHARE = 0.35
# What an answer says of the limit that refused it.
_WORDS = {
    "concurrency": b"requests of the tenant are in flight already",
    "queue_limit": b"requests of the tenant wait already",
    "requests_per_minute": b" requests per minute is used up",
    "tokens_per_minute": b" tokens per minute is used up",
    "token_burst": b"its tenant may have",
}
OVERLOADED = b"requests wait already"
"""What an answer of 503 says where there are tenants and the queue is full."""


@dataclass(frozen=True, slots=True)
class DrawnTenant:
    """One tenant; `members` are those of its table that are not its name and keys."""

    name: str
    members: dict[str, object]

    @property
    def key(self) -> str:
        return f"key-{self.name}"

    def table(self) -> str:
        members = {
            "name": self.name,
            "key_sha256": sha256(self.key.encode()).hexdigest(),
            **self.members,
        }
        # Numbers, texts and switches are alike in JSON and TOML.
        lines = [f"{name} = {json.dumps(value)}" for name, value in members.items()]
        return "\n".join(["[[tenant]]", *lines, ""])


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """The tenants of a run."""

    # The first one, and another one that is read in the middle of the run.
    files: tuple[tuple[DrawnTenant, ...], tuple[DrawnTenant, ...]]
    reload_s: float  # When.
    flags: dict[str, object]  # Of the proxy.

    def texts(self) -> tuple[str, str]:
        first, second = ("\n".join(one.table() for one in file) for file in self.files)
        return first, second

    def found(self, key: str) -> list[DrawnTenant]:
        """Return the tenant of a key in each of the files that have it."""
        return [one for file in self.files for one in file if one.key == key]

    def wrongs(self, request: ClientRequest, received: Received) -> list[str] | None:
        """Return what is wrong with an answer as far as tenants go; None if they do not explain it."""
        found, body = self.found(request.key), bytes(received.body)
        if received.status == 401:
            return [] if len(found) < len(self.files) else ["it got 401 with a good key"]
        if not found:
            return [f"it got {received.status} with a key that is nobody's"]
        for limit, words in _WORDS.items():
            if words not in body or received.status not in (413, 429):
                continue
            if all(limit not in one.members for one in found):
                return [f"it was refused for a {limit} that its tenant has not"]
            if (received.status == 413) != (limit == "token_burst"):
                return [f"it got {received.status} for its {limit}"]
            return []
        return None

    def contradictions(
        self, request: ClientRequest, record: RequestRecord, received: Received
    ) -> list[str]:
        """Return how the proxy's word on whose request it was differs from what it is."""
        names = {one.name for one in self.found(request.key)}
        if received.status == 401:
            names.add("")
        wrong = []
        if record.tenant not in names:
            wrong.append(f"it is logged as {record.tenant!r}'s, is one of {sorted(names)}")
        if received.status == 429 and b"tenant" in received.body:
            logged = record.outcome, bool(record.refused_for)
            if logged != (Outcome.REJECTED, True):
                wrong.append(f"a limit refused it, and it is logged as {logged}")
        return wrong


def draw_tenants(seed: int, span_s: float) -> TenantPlan | None:
    """Return the tenants of a seed; None for most of them."""
    rng = random.Random(f"tenants {seed}")
    if rng.random() >= _SHARE:
        return None
    names = [f"t{place}" for place in range(rng.randint(1, 4))]
    first = tuple(_draw(rng, name) for name in names)
    second = [rng.choice([one, _draw(rng, one.name)]) for one in first]
    if rng.random() < 0.3:
        del second[rng.randrange(len(second))]
    if not second or rng.random() < 0.3:
        second.append(_draw(rng, "new"))
    flags: dict[str, object] = {
        "queue_order": rng.choice(list(QUEUE_ORDERS)),
        "fair_queue": rng.choice(["none", *FAIR_COSTS]),
    }
    return TenantPlan((first, tuple(second)), rng.uniform(0.1, 0.9) * span_s, flags)


def _draw(rng: random.Random, name: str) -> DrawnTenant:
    members: dict[str, object] = {
        "weight": rng.choice([0.5, 1.0, 5.0]),
        "level": rng.choice([-1, 0, 0, 2]),
        "client_priority": rng.random() < 0.5,
        "client_deadline": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        members |= {"requests_per_minute": rng.choice([60, 600]), "request_burst": 10}
    if rng.random() < 0.4:
        burst = rng.choice([500, 4_000])
        members |= {"tokens_per_minute": rng.choice([6_000, 60_000]), "token_burst": burst}
    if rng.random() < 0.3:
        members["concurrency"] = rng.choice([1, 4, 16])
    if rng.random() < 0.3:
        members["queue_limit"] = rng.choice([1, 4, 16])
    if rng.random() < 0.2:
        members["deadline_s"] = rng.choice([0.3, 3.0])
    return DrawnTenant(name, members)


def with_keys(seed: int, plan: TenantPlan, visits: Iterable[Visit]) -> list[Visit]:
    """Return the visits, each request with the key of a tenant, or none that is known."""
    rng = random.Random(f"keys {seed}")
    keys = [one.key for file in plan.files for one in file]

    def with_key(request: ClientRequest) -> ClientRequest:
        key = rng.choice(keys)
        if rng.random() < 0.04:
            key = rng.choice(["", _STRANGER])
        deadline_ms = rng.choice([50, 500, 5_000]) if rng.random() < 0.15 else None
        return replace(request, key=key, deadline_ms=deadline_ms)

    return [replace(visit, requests=tuple(map(with_key, visit.requests))) for visit in visits]
