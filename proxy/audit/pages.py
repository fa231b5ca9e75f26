"""What a page of vLLM's or SGLang's metrics says of each of its data-parallel ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from balanceroute.proxy.core.errors import BalanceRouteError

# By our name, those of the engines: vLLM 0.32, its older names, SGLang.
_GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "kv_tokens": ("sglang:num_used_tokens",),
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_HISTOGRAMS = {"prompts": "vllm:request_prompt_tokens", "outputs": "vllm:request_generation_tokens"}
_CAPACITY = "vllm:cache_config_info"
_TOO_MUCH = 1e18
_RANK_LABELS = ("engine", "dp_rank")
METRICS = (
    *(name for names in _GAUGES.values() for name in names),
    *_HISTOGRAMS.values(),
    _CAPACITY,
)
"""The names of all metrics that matter; of a histogram without its endings."""

_WANTED = tuple(name.encode() for name in METRICS)


class PageError(BalanceRouteError):
    """A page that does not say what an audit needs."""


class Sample(NamedTuple):
    """One value of one series."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Lengths:
    """A histogram of lengths since the engine's start.

    Attributes:
        counts: By the upper end of the bucket, cumulated.
        total: Sum of the lengths.
    """

    counts: dict[float, float] = field(default_factory=dict)
    total: float = 0.0


@dataclass(slots=True)
class RankPage:
    """What is told of one rank; None for what is not.

    Attributes:
        running: Requests in its batch.
        waiting: Requests that wait in the engine.
        kv_tokens: KV tokens in use.
        generated: Tokens generated since the start.
        prompts: Lengths of the prompts of requests that ended.
        outputs: Lengths of their outputs.
    """

    running: float | None = None
    waiting: float | None = None
    kv_tokens: float | None = None
    generated: float | None = None
    prompts: Lengths = field(default_factory=Lengths)
    outputs: Lengths = field(default_factory=Lengths)


def read_page(page: bytes) -> dict[str, RankPage]:
    """Return what a page says, by rank; "0" where it names none.

    Raises:
        PageError: It is none of these engines' pages, or does not tell the KV tokens in use.
    """
    # An engine's page has 65 kB for each rank, most of it of no interest here.
    lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
    try:
        families = list(text_string_to_metric_families(b"\n".join(lines).decode() + "\n"))
    except ValueError as error:
        raise PageError(f"not a page of metrics: {error}") from error
    return pages_of(
        Sample(one.name, one.labels, one.value) for family in families for one in family.samples
    )


def pages_of(samples: Iterable[Sample]) -> dict[str, RankPage]:
    """Return what samples of one engine say, by rank; "0" where they name none.

    Raises:
        PageError: They are none of these engines', or do not tell what runs.
    """
    values: dict[str, dict[str, float]] = {}
    capacity: dict[str, float | None] = {}
    ranks: dict[str, RankPage] = {}
    for sample in samples:
        # What is not known, to a server that keeps samples as well.
        if not isfinite(sample.value):
            continue
        rank = next((sample.labels[x] for x in _RANK_LABELS if x in sample.labels), "0")
        told = ranks.setdefault(rank, RankPage())
        if sample.name == _CAPACITY:
            capacity[rank] = _capacity(sample.labels)
        elif not _take_length(told, sample.name, sample.labels, checked(sample.name, sample.value)):
            values.setdefault(rank, {})[sample.name] = sample.value
    for rank, told in ranks.items():
        found = values.get(rank, {})
        told.running, told.waiting = _first(found, "running"), _first(found, "waiting")
        told.generated, told.kv_tokens = _first(found, "generated"), _first(found, "kv_tokens")
        usage = _first(found, "usage")
        size = capacity.get(rank)
        if told.kv_tokens is None and usage is not None and size is not None:
            told.kv_tokens = usage * size
    if not ranks or any(told.running is None for told in ranks.values()):
        raise PageError("neither vLLM's nor SGLang's metrics")
    return ranks


def checked(name: str, value: float) -> float:
    """Return the value of a sample. Raises PageError: it is no count, no share and no sum."""
    if not 0.0 <= value < _TOO_MUCH:
        raise PageError(f"{name} is {value}")
    return value


def _first(values: dict[str, float], what: str) -> float | None:
    return next((values[name] for name in _GAUGES[what] if name in values), None)


def _capacity(labels: dict[str, str]) -> float | None:
    tokens = labels.get("kv_cache_size_tokens", "")
    if tokens.isdecimal():
        return float(tokens)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return float(blocks) * float(size) if blocks.isdecimal() and size.isdecimal() else None


def _take_length(told: RankPage, name: str, labels: dict[str, str], value: float) -> bool:
    for kind, family in _HISTOGRAMS.items():
        if name.startswith(family):
            lengths: Lengths = getattr(told, kind)
            if name == f"{family}_bucket":
                lengths.counts[float(labels["le"])] = value
            elif name == f"{family}_sum":
                lengths.total = value
            return True
    return False
