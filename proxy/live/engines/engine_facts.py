"""What an engine's pages say that prefill and decode must have in common, and whether two engines fit.

And whether an engine fits its place; the proxy only notes a doubt, as it may be right later.

vLLM 0.32 reports its version (/version), the path or name of the weights (`root` in /v1/models), and the
type and the blocks of its KV cache (the labels of vllm:cache_config_info in /metrics). It does not
report tensor parallelism, revision, dtype or attention backend, so the proxy cannot compare these; NIXL
takes different tensor parallelism and block sizes. What each connector compares by itself:

- NIXL: version, model, KV cache type and more, in a hash that must be equal; the block sizes of the
  attention kernels, of which decode's must be a multiple of prefill's
  (vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py and base_worker.py).
- vLLM's Mooncake: the bytes of a kernel's block (mooncake/mooncake_connector.py).
- vllm-ascend's Mooncake: one block size must divide the other
  (vllm_ascend/distributed/kv_transfer/kv_p2p).

A kernel's block may be smaller than the one that an engine reports, so other block sizes are no reason to
refuse a pair, but for vllm-ascend's.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_gauges import KvSigns
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Role, Status
from balanceroute.proxy.live.engines.model_list import ServedModel

# With the schedulers of vllm-ascend this is not known.
_ASKED_ALWAYS = ("nixl", "mooncake")
_NO_CONNECTOR = "its --kv-transfer-config is missing, or is of another connector"
_UNSET = "auto"  # The type that the weights have.


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The values of an engine's pages; empty for missing ones."""

    version: str = ""
    # Names of base models, each with where its weights come from.
    weights: frozenset[tuple[str, str]] = frozenset()
    cache_dtypes: frozenset[str] = frozenset()  # Of its data-parallel ranks, each once.
    block_tokens: frozenset[int] = frozenset()  # Likewise.


@dataclass(frozen=True, slots=True)
class Misfit:
    """One difference between a prefiller and a decode engine."""

    what: str  # The two values, decode's first.
    why: str  # The consequence.
    refused: bool  # Whether the pair cannot work.

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def facts_of(
    version: str, models: Sequence[ServedModel], caches: Sequence[Mapping[str, str]]
) -> EngineFacts:
    """Return the facts of one engine.

    Args:
        version: Of /version; empty if it is not known.
        models: Of /v1/models.
        caches: The labels of the KV cache's configuration, one set for each rank.
    """
    roots = ((one.name, one.card.get("root")) for one in models if one.parent is None)
    sizes = (cache.get("block_size", "") for cache in caches)
    return EngineFacts(
        version,
        frozenset((name, root) for name, root in roots if isinstance(root, str)),
        frozenset(cache["cache_dtype"] for cache in caches if cache.get("cache_dtype")),
        frozenset(int(size) for size in sizes if size.isdecimal() and int(size) > 0),
    )


def misfits(connector: str, prefill: EngineFacts, decode: EngineFacts) -> Iterator[Misfit]:
    """Yield where two engines differ; an unknown value of one is no difference."""
    hashed = connector == "nixl"
    refusal = 'NIXL refuses the pair ("NIXL compatibility hash mismatch")'
    if prefill.version and decode.version and prefill.version != decode.version:
        what = f"have vLLM {decode.version} and {prefill.version}"
        yield Misfit(what, refusal if hashed else "untested", hashed)
    roots = dict(prefill.weights)
    for name, root in sorted(decode.weights):
        other = roots.get(name, root)
        if other != root:
            what = f"have weights {root} and {other} of {name!r}"
            # Elsewhere the same weights may have another path on each host.
            yield Misfit(what, refusal if hashed else "other weights, or another path", hashed)
    if _differ(prefill.cache_dtypes, decode.cache_dtypes):
        what = (
            f"have cache_dtype {_listed(decode.cache_dtypes)} and {_listed(prefill.cache_dtypes)}"
        )
        # NIXL compares the words, other connectors the bytes, which "auto" may have too.
        refused = hashed or _UNSET not in prefill.cache_dtypes | decode.cache_dtypes
        why = "the KV caches differ" if refused else "the KV caches differ, unless this is its type"
        yield Misfit(what, why, refused)
    if _differ(prefill.block_tokens, decode.block_tokens):
        what = f"have block_size {_listed(decode.block_tokens)} and {_listed(prefill.block_tokens)}"
        if connector == "mooncake-hybrid":  # It sends the other side no size.
            yield Misfit(what, "the connector takes both to be the same", refused=True)
            return
        refused = connector == "mooncake-ascend" and not any(
            ours % theirs == 0 or theirs % ours == 0
            for ours in decode.block_tokens
            for theirs in prefill.block_tokens
        )
        why = "neither divides the other" if refused else "not every connector converts"
        yield Misfit(what, why, refused)


def doubts(
    role: Role,
    connector: str,
    version: str,
    models: Sequence[ServedModel],
    signs: KvSigns,
    *,
    wanted: Collection[str],
    ranks: Collection[int],
) -> Iterator[str]:
    """Yield what an engine's pages say against its place; a missing value is no doubt.

    No page of vLLM has `kv_role`. A wrong one shows where the connector has roles: no prefiller's
    bootstrap server answers, or no KV cache is left.

    Args:
        role: Which it has here.
        connector: That the proxy expects.
        version: Of /version; empty if it is not known.
        models: Of /v1/models; empty if they are not known.
        signs: Of /metrics.
        wanted: The models that the proxy is to serve; empty for all.
        ranks: The data-parallel ranks that are named to it with requests.
    """
    names = {model.name for model in models}
    for name in wanted:
        if names and name not in names:
            yield f"does not serve {name!r}, but {', '.join(sorted(names))}"
    for rank in sorted(ranks):
        if signs.engines and str(rank) not in signs.engines:
            has = ", ".join(sorted(signs.engines, key=lambda one: (len(one), one)))
            yield f"tells of no data-parallel rank {rank}, but of {has}"
    if connector in _ASKED_ALWAYS and signs.computed and signs.asked == 0:
        yield f"computed prompts and asked no KV connector for any: {_NO_CONNECTOR}"
    elif connector == "nixl" and signs.engines and not signs.nixl and _has_nixl_metrics(version):
        yield f"has no metrics of NIXL: {_NO_CONNECTOR}"
    if connector == "nixl" and role is Role.PREFILL and signs.pulls:
        yield "has pulled KV caches since its start, as decode engines do: is it one?"


def _has_nixl_metrics(version: str) -> bool:
    """Return whether NIXL has metrics in a version of vLLM: since 0.12, with or without requests."""
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})\b", version)
    return found is not None and (int(found[1]), int(found[2])) >= (0, 12)


def _differ(ours: frozenset[object], theirs: frozenset[object]) -> bool:
    return bool(ours and theirs and ours != theirs)


def _listed(values: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


# What a Mooncake prefiller's bootstrap server returns: the engine's id, new with each start.
#
# `GET <bootstrap>/query` of vLLM 0.32 answers {"<dp rank>": {"engine_id": ..., "worker_addr":
# ...}}.

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
# Bootstrap servers that are asked at a time.
_AT_ONCE = 64


def read_identity(page: bytes, bootstrap: str) -> BootstrapIdentity:
    """Return the identity of a prefiller's first data-parallel rank.

    Raises:
        FetchError: The page is not what a bootstrap server answers.
    """
    try:
        engine_id = json.loads(page)["0"]["engine_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine") from None
    if not isinstance(engine_id, str) or not engine_id:
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine")
    return BootstrapIdentity(engine_id, bootstrap)


class Identification:
    """Keeps the identities of prefillers up to date.

    Args:
        instances: Those that name a bootstrap server are asked for.
        fetch: GETs a URL and returns the body of a 200; raises FetchError if there is none.
        identified: Called with a prefiller when its identity is another.
    """

    def __init__(
        self,
        instances: Instances,
        fetch: Callable[[str], Awaitable[bytes]],
        identified: Callable[[Prefiller, BootstrapIdentity], None],
    ) -> None:
        self._instances = instances
        self._fetch = fetch
        self._identified = identified

    async def run(self) -> None:
        """Ask bootstrap servers for the ids of their engines, again and again: each start has a new id."""
        while True:
            free = asyncio.Semaphore(_AT_ONCE)
            asked = [
                self._ask(prefiller, prefiller.bootstrap, free)
                for prefiller in self._instances.up()
                if prefiller.bootstrap is not None
            ]
            await asyncio.gather(*asked)
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self, prefiller: Prefiller, bootstrap: str, free: asyncio.Semaphore) -> None:
        try:
            async with free:
                page = await self._fetch(f"{bootstrap}/query")
            identity = read_identity(page, bootstrap)
        except FetchError as error:
            if prefiller.identity is None:
                fields = {"url": prefiller.name, "reason": str(error)}
                _log.warning("no bootstrap", extra={"fields": fields})
            return
        # Quarantine says that the engine may be another one when it comes back.
        if prefiller.status is Status.UP and identity != prefiller.identity:
            prefiller.identity = identity
            self._identified(prefiller, identity)
