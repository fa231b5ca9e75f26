"""A Lease of Kubernetes (coordination.k8s.io/v1) as the place where replicas agree on who leads.

The leader writes its name and a new time into the Lease again and again. Rules:

- Each write names the version of the Lease that it follows, so of two writers one is refused (409).
- No clock but one's own counts. A time in the Lease is a word that is new with each write. Another one
  takes over when the Lease has not changed for its whole duration, as seen here.
- An annotation says of each write what no other has, so that one's own is known again if its answer was
  lost. What has one's own name and another write is another's: a copy of this process.
- It also says if the Lease was given up. One without a holder that does not say so, and one that is gone,
  was edited from outside: its leader may still believe that it leads, for less than the duration.
"""

import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from balanceroute.proxy.live.discovery.kubernetes import why_refused
from balanceroute.proxy.live.leader.leadership import LeaderError
from balanceroute.proxy.wire.http1.client import fetch

if TYPE_CHECKING:
    from balanceroute.proxy.live.discovery.kubernetes import ApiClient

WRITE = "balanceroute/write"
"""The annotation that names the latest write."""
LONGEST_S = 60
"""No replica has a longer duration: what a Lease says beyond it is no replica's word."""

_GIVEN_UP = "given up"
_MOST_BYTES = 1 << 20
_CONFLICT, _NOT_FOUND = 409, 404
_MOST_TRANSITIONS = (1 << 31) - 1
# Writes whose answers did not come may be found in the Lease later.
_REMEMBERED = 8
# A leader whose write was refused looks, and writes again behind what it saw.
_TRIES = 3
_MOST_SHOWN = 253
_TICK = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _RefusedError(Exception):
    """Another write was first, or the Lease is not there, or is there already."""


class KubernetesLease:
    """One Lease; see `LeaderStore`.

    Args:
        namespace: None for that of the account.
        duration_s: For how long a Lease that does not change is another's.
        clock: Seconds, of one's own.
        unix_s: The wall clock, for people alone.
        rng: Names writes.
    """

    def __init__(
        self,
        api: "ApiClient",
        lease: str,
        namespace: str | None,
        *,
        name: str,
        duration_s: int,
        clock: Callable[[], float],
        unix_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.name, self.handed_over, self.due_s = name, False, inf
        self._api, self._lease, self._namespace = api, lease, namespace
        self._duration_s, self._clock, self._unix_s, self._rng = duration_s, clock, unix_s, rng
        self._own: Mapping[str, Any] | None = None  # The Lease as it was written here last.
        self._written: deque[str] = deque(maxlen=_REMEMBERED)
        self._latest = _EPOCH  # The time in the latest write.
        # What counts of the Lease as it was read last, and since when it is so.
        self._seen: object = ()
        self._seen_s = 0.0

    @property
    def place(self) -> str:
        return f"Lease {self._lease}"

    async def claim(self, *, leads: bool) -> str:
        """Lead, or go on leading, if that may be; return who leads. See `LeaderStore.claim`."""
        for _ in range(_TRIES):
            try:
                if self._own is not None:
                    return await self._write(self._own, _spec(self._own))
                return await self._try(leads=leads)
            except _RefusedError:
                self._own = None
        raise LeaderError("the Lease changes faster than it can be written")

    async def look(self) -> str:
        """Return its version if it is this process's; see `LeaderStore.look`."""
        status, lease = await self._exchange(b"GET", self._path)
        if status == _NOT_FOUND or _spec(lease).get("holderIdentity") != self.name:
            return ""
        return _version(lease)

    async def release(self) -> None:
        """Give it up, if it is this process's."""
        own, self._own = self._own, None
        if own is None:
            return
        time = self._next_time()
        spec = _spec(own) | {"holderIdentity": "", "renewTime": time}
        try:
            await self._send(b"PUT", own, spec, f"{time} {_GIVEN_UP}")
        except _RefusedError:
            return  # It is not any more.

    def hand_over_state(self) -> dict[str, object]:
        self.handed_over = True
        return {"name": self.name}

    def close(self) -> None:
        self._api.close()

    async def _try(self, *, leads: bool) -> str:
        """Read it, and take it if that may be."""
        status, lease = await self._exchange(b"GET", self._path)
        now_s = self._clock()  # After the answer: it may have changed until then.
        spec = {} if status == _NOT_FOUND else _spec(lease)
        holder = spec.get("holderIdentity") or ""
        holder = holder if isinstance(holder, str) else "?"
        last = "" if status == _NOT_FOUND else _last_write(lease)
        own = holder == self.name and (self.handed_over or last in self._written)
        if own or (leads and not holder):
            # No other process has had it since the last write here.
            return await self._write(lease, spec, created=status == _NOT_FOUND)
        seen = None if status == _NOT_FOUND else _version(lease)
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        self.due_s = self._seen_s + self._wait_s(spec)
        given_up = not holder and last == f"{spec.get('renewTime')} {_GIVEN_UP}"
        if given_up or now_s >= self.due_s:
            return await self._take(lease, spec, created=status == _NOT_FOUND)
        return f"another process called {holder}" if holder == self.name else _shown(holder)

    def _wait_s(self, spec: Mapping[str, Any]) -> float:
        """Return for how long a Lease must not have changed; its holder may have another setting."""
        lease_s = spec.get("leaseDurationSeconds")
        if lease_s is None:
            return self._duration_s
        if not isinstance(lease_s, int) or isinstance(lease_s, bool):
            return LONGEST_S
        return max(self._duration_s, min(lease_s, LONGEST_S))

    async def _take(
        self, lease: Mapping[str, Any], spec: Mapping[str, Any], *, created: bool
    ) -> str:
        changed = {"leaseTransitions": _turn(spec) + 1, "acquireTime": self._next_time()}
        return await self._write(lease, {**spec, **changed}, created=created)

    async def _write(
        self, lease: Mapping[str, Any], spec: Mapping[str, Any], *, created: bool = False
    ) -> str:
        """Write one's name and a new time. Raises _RefusedError."""
        time = self._next_time()
        write = f"{time} {self._rng.getrandbits(64):016x}"
        self._written.append(write)
        since = spec.get("acquireTime")
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": since if isinstance(since, str) else time,
            "renewTime": time,
            "leaseTransitions": _turn(spec),
        }
        written = await self._send(b"POST" if created else b"PUT", lease, spec, write)
        answer = _spec(written)
        if answer.get("holderIdentity") != self.name or answer.get("renewTime") != time:
            raise LeaderError("the answer to a write is another Lease than the one written")
        _version(written)  # The next write names it.
        self._own = written
        return self.name

    async def _send(
        self, method: bytes, lease: Mapping[str, Any], spec: Mapping[str, Any], write: str
    ) -> Mapping[str, Any]:
        path = self._folder
        metadata: dict[str, Any] = {"name": self._lease, "namespace": self._space}
        if method != b"POST":
            # With its version, without which a write follows nothing.
            path, metadata = self._path, {**_metadata(lease), "resourceVersion": _version(lease)}
        metadata["annotations"] = {**_notes(metadata), WRITE: write}
        thing = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": dict(spec),
        }
        status, written = await self._exchange(method, path, thing)
        if status in (_CONFLICT, _NOT_FOUND):
            raise _RefusedError
        return written

    async def _exchange(
        self, method: bytes, path: str, thing: Mapping[str, Any] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Return the status, a good one, 404 of a Lease or 409, and the Lease. Raises LeaderError."""
        body = b"" if thing is None else json.dumps(thing).encode()
        request = self._api.request(method, path, body)
        # The caller limits the time.
        answer = await fetch(*request, timeout_s=float(LONGEST_S), max_bytes=_MOST_BYTES)
        if answer.status == _CONFLICT or (answer.status == _NOT_FOUND and method != b"POST"):
            return answer.status, {}
        if answer.status not in (200, 201):
            raise LeaderError(why_refused(answer.status, answer.body))
        try:
            lease = json.loads(answer.body)
        except (ValueError, RecursionError):
            lease = None
        if not isinstance(lease, Mapping):
            raise LeaderError("the answer is no Lease")
        return answer.status, lease

    def _next_time(self) -> str:
        """Return a time for people, which no earlier write had: else a write would change nothing."""
        try:
            now = _EPOCH + timedelta(seconds=self._unix_s())
        except OverflowError:
            now = _EPOCH
        self._latest = max(now, self._latest + _TICK)
        return self._latest.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    @property
    def _space(self) -> str:
        return self._namespace or self._api.namespace

    @property
    def _folder(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{quote(self._space)}/leases"

    @property
    def _path(self) -> str:
        return f"{self._folder}/{quote(self._lease)}"


def _metadata(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = lease.get("metadata")
    if not isinstance(metadata, Mapping):
        raise LeaderError("a Lease without metadata")
    return metadata


def _spec(lease: Mapping[str, Any]) -> dict[str, Any]:
    spec = lease.get("spec")
    return dict(spec) if isinstance(spec, Mapping) else {}


def _version(lease: Mapping[str, Any]) -> str:
    version = _metadata(lease).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise LeaderError("a Lease without a version")
    return version


def _turn(spec: Mapping[str, Any]) -> int:
    """Return how often the leader has changed; from 0 again if that cannot be."""
    count = spec.get("leaseTransitions")
    return count if isinstance(count, int) and 0 <= count < _MOST_TRANSITIONS else 0


def _notes(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    notes = metadata.get("annotations")
    return notes if isinstance(notes, Mapping) else {}


def _last_write(lease: Mapping[str, Any]) -> str:
    return str(_notes(_metadata(lease)).get(WRITE, ""))


def _shown(name: str) -> str:
    """Return a name as answers and the log may have it."""
    return "".join(one if one.isprintable() else "?" for one in name[:_MOST_SHOWN])
