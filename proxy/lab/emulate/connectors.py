"""What each KV connector puts into `kv_transfer_params`, and how it interprets them.

NIXL and vLLM's Mooncake are as recorded from vLLM 0.32, including failures. The three of vllm-ascend
follow its source (mooncake_connector.py, mooncake_hybrid_connector.py, mooncake_layerwise_connector.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from balanceroute.proxy.lab.emulate.leases import EndedLease, Lease, LeaseBook
from balanceroute.topologies import CONNECTORS, KvFlow

# A decoder that cannot reach the named prefiller reports that after this time.
CONNECT_TIMEOUT_S = 5.4


class KvPeer(Protocol):
    """An engine as its peers know it."""

    @property
    def name(self) -> str:
        """Its name in the fleet, the same after a restart."""
        ...

    @property
    def engine_id(self) -> str:
        """Its id, new with each start."""
        ...

    @property
    def host(self) -> str:
        """Its address."""
        ...

    @property
    def side_port(self) -> int:
        """Port of its KV transport."""
        ...

    @property
    def version(self) -> str:
        """Its version, which both sides of NIXL compare."""
        ...


class KvSource(KvPeer, Protocol):
    """A prefiller."""

    @property
    def bootstrap_url(self) -> str:
        """URL of its bootstrap server; empty if it has none."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
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
    """The decoder reads blocks that no longer hold the prompt's KV cache.

    Attributes:
        engine_id: The engine that has the blocks.
        lease: The named lease; None if it is held, or was never granted.
    """

    engine_id: str
    lease: EndedLease | None


class Hang:
    """The decoder waits for ever."""


Claim = Lease | Failure | Stale | Await | AskMetaserver | Hang


def claim(
    connector: str,
    params: Mapping[str, Any],
    sources: list[KvSource],
    book: LeaseBook,
    peer: KvPeer,
) -> Claim:
    """Return what a decode rank does about the parameters of a request.

    Args:
        connector: The name of the fleet's connector.
        params: `kv_transfer_params` that ask for a remote prefill.
        sources: All prefillers, including dead ones.
        book: Their leases.
        peer: The rank's engine.
    """
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
    connector: str, source: KvSource, lease: Lease, block_tokens: int, last_token: int
) -> dict[str, object] | None:
    """Return `kv_transfer_params` of a prefill answer; None if the connector has none."""
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
        **_OWN_KEYS[connector](lease, block_tokens, last_token),
    }


def lease_key(
    connector: str, source: KvSource, params: Mapping[str, Any], internal_id: str
) -> tuple[str, str]:
    """Return the key by which a decoder names a prefill.

    Args:
        connector: The name of the fleet's connector.
        source: The prefiller.
        params: `kv_transfer_params` of the prefill request.
        internal_id: The request's id inside the prefiller.
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
    """Return what a decode rank sends to the metaserver (layerwise)."""
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


def _nixl_keys(lease: Lease, _block_tokens: int, _last_token: int) -> dict[str, object]:
    return {
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(lease.prompt.tokens),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def _ascend_keys(lease: Lease, block_tokens: int, last_token: int) -> dict[str, object]:
    return {
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_ptp_size": 1,
        "last_token_id": last_token,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": len(lease.blocks),
        "remote_block_size": block_tokens,
    }


def _hybrid_keys(lease: Lease, _block_tokens: int, last_token: int) -> dict[str, object]:
    return {
        "remote_ptp_size": 1,
        "last_token_id": last_token,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": len(lease.blocks),
    }


# What a prefill answer has in addition to the keys that every pull needs.
_OWN_KEYS: dict[str, Callable[[Lease, int, int], dict[str, object]]] = {
    "nixl": _nixl_keys,
    "mooncake-ascend": _ascend_keys,
    "mooncake-hybrid": _hybrid_keys,
}


# vLLM's NIXL and vllm-ascend's Mooncake read the named blocks. Neither checks whether these are, or
# ever were, those of the request; only the engine's id is checked.
def _claim_pull(
    params: Mapping[str, Any], sources: list[KvSource], book: LeaseBook, version: str | None
) -> Claim:
    needed = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
    if any(params.get(key) is None for key in (*needed, "remote_block_ids")):
        return Hang()
    address = params["remote_host"], params["remote_port"]
    source = next((known for known in sources if (known.host, known.side_port) == address), None)
    if source is None:
        return Failure(CONNECT_TIMEOUT_S)
    if version is not None and source.alive and source.version != version:
        book.mixed_pairs += 1
        return Failure()  # "NIXL compatibility hash mismatch".
    engine_id, name = str(params["remote_engine_id"]), str(params["remote_request_id"])
    lease = book.find(engine_id, name)
    if not source.alive or engine_id != source.engine_id:
        return Failure()
    if lease is None or params["remote_block_ids"] != [lease.blocks]:
        return Stale(engine_id, book.ended(engine_id, name))
    return lease


def _claim_named(params: Mapping[str, Any], sources: list[KvSource]) -> Claim:
    address = str(params.get("remote_bootstrap_addr")).rstrip("/")
    transfer = params.get("transfer_id")
    source = next((known for known in sources if known.bootstrap_url == address), None)
    if source is None or not source.alive or transfer is None:
        return Hang()
    if params.get("remote_engine_id") != source.engine_id:
        return Failure()
    return Await(source.engine_id, str(transfer))
