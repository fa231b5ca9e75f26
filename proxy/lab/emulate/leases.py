"""KV blocks that prefillers keep for decode ranks, and how each such lease ends."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from balanceroute.proxy.lab.emulate.request import Prompt
from balanceroute.topologies import CONNECTORS, KvFlow

_ENDED_KNOWN = 4096
# The content of blocks that were not written recently.
_NOISE = Prompt([0], None)


class LeaseEnd(Enum):
    PULLED = "pulled"  # A decode rank has the KV cache.
    RELEASED = "released"  # A decode rank claimed it and left before the pull was complete.
    EXPIRED = "expired"  # No decode rank claimed it in time.
    LOST = "lost"  # The prefiller died.


class BlockPool:
    def __init__(self, blocks: int | None) -> None:
        self.used = 0
        self.on_free: Callable[[], None] | None = None  # Called when blocks were freed.
        self._blocks = blocks
        self._free: list[int] = []
        self._next = 1  # vLLM never hands out block 0.

    @property
    def usage(self) -> float:
        """The share in use; 0 without a limit."""
        return 0.0 if self._blocks is None else self.used / self._blocks

    def take(self, count: int) -> list[int] | None:
        """Return the ids of `count` blocks, or None if there are not enough.

        A request larger than the whole pool gets its blocks once the pool is empty: no other
        prefiller could serve it either.
        """
        if self._blocks is not None and self.used and self.used + count > self._blocks:
            return None
        self.used += count
        taken = self._free[:count]
        del self._free[:count]
        missing = count - len(taken)
        taken += range(self._next, self._next + missing)
        self._next += missing
        return taken

    def free(self, blocks: list[int]) -> None:
        self.used -= len(blocks)
        self._free += blocks
        if self.on_free is not None:
            self.on_free()


@dataclass(slots=True, eq=False)
class Lease:
    """The KV cache of one prompt, on the prefiller that computed it."""

    prefiller: str  # The engine id of the prefiller.
    # Names the lease for a decode rank: an engine id and a request or transfer id.
    key: tuple[str, str]
    prompt: Prompt
    blocks: list[int]
    pool: BlockPool
    end: LeaseEnd | None = None  # How it ended; None while it is held.
    # Whether a decode rank is reading it; it cannot expire then (the decoder's heartbeats renew
    # it).
    pulling: bool = False
    overdue: bool = False  # Whether its time ended while it was being read.
    short: bool = False  # Whether it is shorter than its prefiller says, by a fault.
    granted_s: float = 0.0  # When it began, on the event loop's clock.
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class EndedLease:
    """The record of a lease that ended. Times are those of the event loop's clock."""

    end: LeaseEnd  # How it ended.
    granted_s: float  # When it began.
    ended_s: float  # When it ended.
    short: bool  # See `Lease`.


@dataclass(frozen=True, slots=True)
class Misread:
    """A request that was answered with the KV cache of another prompt."""

    request_id: str  # The id of its answer.
    lease: EndedLease | None  # The named lease; None if it is held, or was never granted.
    engine: str  # The name of the engine that read it.
    arrived_s: float  # When the request had arrived there, on the event loop's clock.
    # Whether it comes from the rank's prefix cache, where an earlier misread has left it.
    again: bool = False
    prefiller: str = ""  # The name of the engine that gave the lease; empty if that is not known.

    @property
    def end(self) -> LeaseEnd | None:
        return None if self.lease is None else self.lease.end


@dataclass(slots=True)
class LeaseBook:
    """All leases of a fleet, in one process, as the KV transport sees them."""

    # Number of ended leases, by how they ended.
    ends: Counter[LeaseEnd] = field(default_factory=Counter)
    # How often a decode rank claimed an ended lease, by how it had ended.
    misses: Counter[LeaseEnd] = field(default_factory=Counter)
    # The requests that were answered with another prompt's KV cache.
    misreads: list[Misread] = field(default_factory=list)
    # The requests of which a decode engine died, as they need more blocks than there are.
    overruns: list[str] = field(default_factory=list)
    mixed_pairs: int = 0  # How often a decode rank refused a prefiller of another version.
    # The last two different prompts of each prefiller, the later one last.
    _written: dict[str, list[Prompt]] = field(default_factory=dict)
    _held: dict[Lease, None] = field(default_factory=dict)
    _by_key: dict[tuple[str, str], Lease] = field(default_factory=dict)
    # The last ones that ended, the earliest first.
    _ended: dict[tuple[str, str], EndedLease] = field(default_factory=dict)
    _awaited: dict[tuple[str, str], list[Callable[[Lease], None]]] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def idle(self) -> bool:
        """Whether no lease is held and no decode rank waits for one."""
        return not self._held and not self._awaited

    def grant(self, lease: Lease, expires_s: float) -> None:
        """Hold a lease until it is pulled, or until `expires_s` on the event loop's clock."""
        self._held[lease] = None
        self._wrote(lease.prefiller, lease.prompt)
        # If a transfer id is used twice, the older blocks cannot be claimed any more: they expire.
        self._by_key[lease.key] = lease
        loop = asyncio.get_running_loop()
        lease.granted_s = loop.time()
        lease.timer = loop.call_at(expires_s, self._expire, lease)
        waiters = self._awaited.get(lease.key)
        if waiters:
            wake = waiters.pop(0)
            if not waiters:
                del self._awaited[lease.key]
            wake(lease)

    def begin_anew(self, engine_id: str, name: str) -> None:
        """Remove the ended lease of a name, which a client may reuse for a later request."""
        self._ended.pop((engine_id, name), None)

    def find(self, engine_id: str, name: str) -> Lease | None:
        lease = self._by_key.get((engine_id, name))
        ended = self.ended(engine_id, name)
        if ended is not None:
            self.misses[ended.end] += 1
        return None if lease is None or lease.pulling else lease

    def ended(self, engine_id: str, name: str) -> EndedLease | None:
        key = (engine_id, name)
        return None if key in self._by_key else self._ended.get(key)

    def stale(self, engine_id: str, prompt: Prompt) -> Prompt:
        """Return the prompt that a decode rank reads in blocks that no longer hold its own.

        Real blocks may keep their content for a while. Here they never do, so that a proxy that relies
        on it always fails.
        """
        for other in reversed(self._written.get(engine_id, [])):
            if other.digest != prompt.digest:
                return other
        return _NOISE

    def _wrote(self, engine_id: str, prompt: Prompt) -> None:
        before = [old for old in self._written.get(engine_id, []) if old.digest != prompt.digest]
        self._written[engine_id] = [*before[-1:], prompt]

    def await_grant(
        self, engine_id: str, name: str, wake: Callable[[Lease], None]
    ) -> Callable[[], None]:
        """Call `wake` when such a lease is granted; return a function that cancels the wait."""
        key = (engine_id, name)
        self._awaited.setdefault(key, []).append(wake)

        def forget() -> None:
            waiting = self._awaited.get(key, [])
            if wake in waiting:
                waiting.remove(wake)
                if not waiting:
                    del self._awaited[key]

        return forget

    def finish(self, lease: Lease, end: LeaseEnd) -> None:
        """End a lease and free its blocks; one that has ended stays as it is."""
        if lease.end is not None:
            return
        lease.end = end
        self.ends[end] += 1
        now_s = asyncio.get_running_loop().time()
        self._ended[lease.key] = EndedLease(end, lease.granted_s, now_s, lease.short)
        if len(self._ended) > _ENDED_KNOWN:
            del self._ended[next(iter(self._ended))]
        if lease.timer is not None:
            lease.timer.cancel()
        del self._held[lease]
        if self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]
        lease.pool.free(lease.blocks)

    def give_back(self, lease: Lease) -> None:
        """Undo the start of a pull: the decode rank died without notice."""
        lease.pulling = False
        if lease.overdue:
            self.finish(lease, LeaseEnd.EXPIRED)

    def age(self, seconds: float) -> None:
        """Let all leases end that much earlier."""
        loop = asyncio.get_running_loop()
        for lease in list(self._held):
            assert lease.timer is not None
            ends_s = lease.timer.when() - seconds
            lease.timer.cancel()
            if ends_s <= loop.time():
                self._expire(lease)
            else:
                lease.timer = loop.call_at(ends_s, self._expire, lease)

    def lose(self, engine_id: str) -> None:
        self._written.pop(engine_id, None)
        for lease in [lease for lease in self._held if lease.prefiller == engine_id]:
            self.finish(lease, LeaseEnd.LOST)

    def _expire(self, lease: Lease) -> None:
        if lease.pulling:
            lease.overdue = True
        else:
            self.finish(lease, LeaseEnd.EXPIRED)


# The `kv_transfer_params` that each KV connector writes, and how it interprets them.
#
# NIXL and vLLM's Mooncake are as recorded from vLLM 0.32, including failures. The three of
# vllm-ascend follow its source (mooncake_connector.py, mooncake_hybrid_connector.py,
# mooncake_layerwise_connector.py).

# A decoder that cannot reach the named prefiller reports that after this time.
CONNECT_TIMEOUT_S = 5.4


class KvPeer(Protocol):
    """An engine as its peers know it."""

    @property
    def name(self) -> str: ...

    @property
    def engine_id(self) -> str: ...  # New with each start.

    @property
    def host(self) -> str: ...

    @property
    def side_port(self) -> int: ...

    @property
    def version(self) -> str: ...  # Which both sides of NIXL compare.

    @property
    def bootstrap_url(self) -> str: ...

    @property
    def alive(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PullFailure:
    """The decoder answers with an engine error, after a time in emulated seconds."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Await:
    """The decoder waits, without a limit, until a prefill of this name is done."""

    engine_id: str
    name: str


@dataclass(frozen=True, slots=True)
class AskMetaserver:
    """The decoder requests a prefill at this URL, and waits for it."""

    url: str


@dataclass(frozen=True, slots=True)
class Stale:
    """The decoder reads blocks that no longer hold the prompt's KV cache."""

    engine_id: str  # The engine that has the blocks.
    lease: EndedLease | None  # The named lease; None if it is held, or was never granted.


class Hang:
    """The decoder waits for ever."""


Claim = Lease | PullFailure | Stale | Await | AskMetaserver | Hang


def claim(
    connector: str,
    params: Mapping[str, Any],
    sources: list[KvPeer],
    book: LeaseBook,
    peer: KvPeer,
) -> Claim:
    """Return a decode rank's pull for the `kv_transfer_params` of a request."""
    match CONNECTORS[connector].flow:
        case KvFlow.PULL:
            same = peer.version if connector == "nixl" else None
            return _claim_pull(params, sources, book, same)
        case KvFlow.NAMED:
            return _claim_named(params, sources)
        case KvFlow.DECODE_FIRST:
            url = params.get("metaserver")
            return AskMetaserver(url) if isinstance(url, str) and url else Hang()


def prefill_answer(
    connector: str, source: KvPeer, lease: Lease, block_tokens: int, last_token: int
) -> dict[str, object] | None:
    if CONNECTORS[connector].flow is not KvFlow.PULL:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [lease.blocks],
        "remote_engine_id": source.engine_id,
        "remote_request_id": lease.key[1],
        "remote_host": source.host,
        "remote_port": source.side_port,
        **_own_keys(connector, lease, block_tokens, last_token),
    }


def lease_key(
    connector: str, source: KvPeer, params: Mapping[str, Any], internal_id: str
) -> tuple[str, str]:
    """Return the key by which a decoder names a prefill.

    `params` are the `kv_transfer_params` of the prefill request, `internal_id` its id in the prefiller.
    """
    match CONNECTORS[connector].flow:
        case KvFlow.PULL:
            return source.engine_id, internal_id
        case KvFlow.NAMED:
            return source.engine_id, str(params.get("transfer_id"))
        case KvFlow.DECODE_FIRST:
            return str(params.get("remote_engine_id")), str(params.get("request_id"))


def metaserver_params(
    peer: KvPeer, request_id: str, *, num_blocks: int, block_tokens: int
) -> dict[str, object]:
    """Return a decode rank's message to the metaserver (layerwise)."""
    return {
        "token_ids": [],
        "request_id": request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, num_blocks + 1))],
        "remote_block_size": block_tokens,
        "remote_engine_id": peer.engine_id,
        "remote_host": peer.host,
        "remote_port": peer.side_port,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }


def alien_params(params: dict[str, object]) -> dict[str, object]:
    """Return parameters that point to another request's KV cache, as from a faulty prefiller."""
    return params | {
        "remote_engine_id": "00000000-0000-4000-8000-000000000000",
        "remote_host": "169.254.169.254",
        "remote_port": 80,
        "remote_block_ids": [[7]],
    }


def _own_keys(
    connector: str, lease: Lease, block_tokens: int, last_token: int
) -> dict[str, object]:
    """Return the members of a prefill answer beside those that every pull needs."""
    if connector == "nixl":
        return {
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(lease.prompt.tokens),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
    ascend = {
        "remote_ptp_size": 1,
        "last_token_id": last_token,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": len(lease.blocks),
    }
    if connector == "mooncake-hybrid":
        return ascend
    groups = {"remote_pcp_size": 1, "remote_dcp_size": 1}
    return groups | ascend | {"remote_block_size": block_tokens}


# vLLM's NIXL and vllm-ascend's Mooncake read the named blocks. Neither checks whether these are, or
# ever were, those of the request; only the engine's id is checked.
def _claim_pull(
    params: Mapping[str, Any], sources: list[KvPeer], book: LeaseBook, version: str | None
) -> Claim:
    needed = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
    if any(params.get(key) is None for key in (*needed, "remote_block_ids")):
        return Hang()
    address = params["remote_host"], params["remote_port"]
    source = next((known for known in sources if (known.host, known.side_port) == address), None)
    if source is None:
        return PullFailure(CONNECT_TIMEOUT_S)
    if version is not None and source.alive and source.version != version:
        book.mixed_pairs += 1
        return PullFailure()  # "NIXL compatibility hash mismatch".
    engine_id, name = str(params["remote_engine_id"]), str(params["remote_request_id"])
    lease = book.find(engine_id, name)
    if not source.alive or engine_id != source.engine_id:
        return PullFailure()
    if lease is None or params["remote_block_ids"] != [lease.blocks]:
        return Stale(engine_id, book.ended(engine_id, name))
    return lease


def _claim_named(params: Mapping[str, Any], sources: list[KvPeer]) -> Claim:
    address = str(params.get("remote_bootstrap_addr")).rstrip("/")
    transfer = params.get("transfer_id")
    source = next((known for known in sources if known.bootstrap_url == address), None)
    if source is None or not source.alive or transfer is None:
        return Hang()
    if params.get("remote_engine_id") != source.engine_id:
        return PullFailure()
    return Await(source.engine_id, str(transfer))
