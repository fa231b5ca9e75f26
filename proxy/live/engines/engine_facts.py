"""What an engine tells of what prefill and decode must have in common, and whether two engines fit.

vLLM 0.32 tells its version (/version), the path or name of the weights (`root` in /v1/models), and the
type and the blocks of its KV cache (the labels of vllm:cache_config_info in /metrics). It does not
tell tensor parallelism, revision, dtype or attention backend, so these cannot be compared; NIXL takes
different tensor parallelism and block sizes. What each connector compares by itself:

- NIXL: version, model, KV cache type and more, in a hash that must be equal; the block sizes of the
  attention kernels, of which decode's must be a multiple of prefill's
  (vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py and base_worker.py).
- vLLM's Mooncake: the bytes of a kernel's block (mooncake/mooncake_connector.py).
- vllm-ascend's Mooncake: one block size must divide the other
  (vllm_ascend/distributed/kv_transfer/kv_p2p).

A kernel's block may be smaller than the one that an engine tells, so other block sizes are no reason to
refuse a pair, but for vllm-ascend's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from balanceroute.proxy.live.engines.model_list import ServedModel

_UNSET = "auto"  # The type that the weights have.


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells; empty for what it does not.

    Attributes:
        weights: Names of base models, each with where its weights come from.
        cache_dtypes: Of its data-parallel ranks, each once.
        block_tokens: Likewise.
    """

    version: str = ""
    weights: frozenset[tuple[str, str]] = frozenset()
    cache_dtypes: frozenset[str] = frozenset()
    block_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Misfit:
    """One difference between a prefiller and a decode engine.

    Attributes:
        what: The two values, decode's first.
        why: What follows.
        refused: Whether the pair cannot work.
    """

    what: str
    why: str
    refused: bool

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
    """Yield where two engines differ; what one of them does not tell is no difference."""
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
        # NIXL compares the words, others the bytes, which "auto" may have too.
        refused = hashed or _UNSET not in prefill.cache_dtypes | decode.cache_dtypes
        why = "the KV caches differ" if refused else "the KV caches differ, unless this is its type"
        yield Misfit(what, why, refused)
    if _differ(prefill.block_tokens, decode.block_tokens):
        what = f"have block_size {_listed(decode.block_tokens)} and {_listed(prefill.block_tokens)}"
        if connector == "mooncake-hybrid":  # It tells the other side none.
            yield Misfit(what, "the connector takes both to be the same", refused=True)
            return
        refused = connector == "mooncake-ascend" and not any(
            ours % theirs == 0 or theirs % ours == 0
            for ours in decode.block_tokens
            for theirs in prefill.block_tokens
        )
        why = "neither divides the other" if refused else "not every connector converts"
        yield Misfit(what, why, refused)


def _differ(ours: frozenset[object], theirs: frozenset[object]) -> bool:
    return bool(ours and theirs and ours != theirs)


def _listed(values: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))
