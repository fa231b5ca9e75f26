"""GET /metrics of an engine: the part of vLLM 0.32's Prometheus text that shows its load."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from balanceroute.proxy.lab.emulate.faults import MalformedScrape

CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
_REASONS = ("stop", "length", "abort", "error", "repetition")
_HUGE_BYTES = 20 << 20
_WORDS = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "nixl_num_descriptors": "Histogram of number of descriptors per NIXL  KV Cache transfers.",
}


# Powers of ten times 1, 2 and 5, as vLLM's.
_LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass(slots=True)
class LengthCounts:
    """How many requests had which length."""

    # By bucket, not cumulated; the last one has no upper end.
    counts: list[int] = field(default_factory=lambda: [0] * (len(_LENGTH_BOUNDS) + 1))
    total: int = 0  # Sum of the lengths.

    def add(self, tokens: int) -> None:
        self.counts[bisect_left(_LENGTH_BOUNDS, tokens)] += 1
        self.total += tokens


@dataclass(slots=True)
class RankCounters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pulled_tokens: int = 0
    # Blocks of each KV cache that was pulled.
    pulls: LengthCounts = field(default_factory=LengthCounts)
    prefix_queries: int = 0  # Prompt tokens that were looked up in the prefix cache.
    prefix_hits: int = 0  # Those that were found.
    preemptions: int = 0
    # Sequences by their finish reason, or "abort".
    finished: Counter[str] = field(default_factory=Counter)
    # Prompts of requests that were answered.
    prompts: LengthCounts = field(default_factory=LengthCounts)
    outputs: LengthCounts = field(default_factory=LengthCounts)  # Their outputs, by sequence.


@dataclass(frozen=True, slots=True)
class EmulatedRankState:
    rank: int  # Its number, the `engine` label.
    running: int  # Sequences in the batch, or prompts being computed.
    waiting: int  # Sequences that wait for a slot or for blocks.
    arriving: int  # Sequences that wait for their KV cache.
    usage: float  # Share of the KV cache in use.
    counters: RankCounters


def render_metrics(
    model: str,
    states: Sequence[EmulatedRankState],
    *,
    block_tokens: int,
    kv_tokens: int | None,
    awake: bool = True,
    nixl: bool = False,
) -> bytes:
    """Return the page; with metrics of NIXL, or without."""
    lines: list[str] = []

    def family(name: str, kind: str, words: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP vllm:{name} {words}\n# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{{{labels}}} {_number(value)}" for labels, value in samples)

    def each(**labels: str) -> list[tuple[str, EmulatedRankState]]:
        return [(_labels(model, state.rank, **labels), state) for state in states]

    for name, words, value in _GAUGES:
        family(name, "gauge", words, ((text, value(state)) for text, state in each()))
    family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        (
            (text, float(state.arriving if reason == "deferred" else state.waiting))
            for reason in ("capacity", "deferred")
            for text, state in each(reason=reason)
        ),
    )
    family(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping.",
        ((text, float(awake)) for text, _ in each(sleep_state="awake")),
    )
    for name, words, value in _COUNTERS:
        family(name, "counter", words, ((text, value(state)) for text, state in each()))
    family(
        "request_success_total",
        "counter",
        "Count of successfully processed requests.",
        (
            (text, float(state.counters.finished[reason]))
            for reason in _REASONS
            for text, state in each(finished_reason=reason)
        ),
    )
    prompts = [(state.rank, state.counters.prompts) for state in states]
    outputs = [(state.rank, state.counters.outputs) for state in states]
    lines += _histogram("request_prompt_tokens", prompts, model)
    lines += _histogram("request_generation_tokens", outputs, model)
    if nixl:
        pulls = [(state.rank, state.counters.pulls) for state in states]
        lines += _histogram("nixl_num_descriptors", pulls, model)
    words, config = "Information of the LLMEngine CacheConfig", _config(block_tokens, kv_tokens)
    family("cache_config_info", "gauge", words, ((text, 1.0) for text, _ in each(**config)))
    return ("\n".join(lines) + "\n").encode()


def _config(block_tokens: int, kv_tokens: int | None) -> dict[str, str]:
    return {
        "block_size": str(block_tokens),
        "cache_dtype": "auto",
        "kv_cache_size_tokens": str(kv_tokens),
        "num_gpu_blocks": "None" if kv_tokens is None else str(-(-kv_tokens // block_tokens)),
    }


def _histogram(name: str, ranks: Sequence[tuple[int, LengthCounts]], model: str) -> list[str]:
    lines = [f"# HELP vllm:{name} {_WORDS[name]}\n# TYPE vllm:{name} histogram"]
    for rank, lengths in ranks:
        lines += _samples(name, model, rank, tuple(lengths.counts), lengths.total)
    return lines


@lru_cache(maxsize=1_000)  # Most are as they were when the page was read last.
def _samples(name: str, model: str, rank: int, counts: tuple[int, ...], total: int) -> list[str]:
    bounds = [*(f"{bound}.0" for bound in _LENGTH_BOUNDS), "+Inf"]
    lines = [
        f"vllm:{name}_bucket{{{_labels(model, rank, le=bound)}}} {_number(float(count))}"
        for bound, count in zip(bounds, accumulate(counts), strict=True)
    ]
    for word, value in (("count", sum(counts)), ("sum", total)):
        lines.append(f"vllm:{name}_{word}{{{_labels(model, rank)}}} {_number(float(value))}")
    return lines


def malformed_metrics(kind: MalformedScrape, page: bytes) -> tuple[int, bytes]:
    """Return status and body of a faulty scrape."""
    match kind:
        case MalformedScrape.GARBAGE:
            return 200, b"\x00\xff<html>no metrics here</html>\n" * 10
        case MalformedScrape.EMPTY:
            return 200, b""
        case MalformedScrape.HUGE:
            return 200, page + b"# " + b"x" * _HUGE_BYTES + b"\n"
        case MalformedScrape.STATUS_500:
            return 500, b"Internal Server Error"
        case _:
            word = {
                MalformedScrape.NAN: "NaN",
                MalformedScrape.NEGATIVE: "-17.0",
                MalformedScrape.INFINITE: "+Inf",
                MalformedScrape.IDLE: "0.0",
            }[kind]
            lines = page.decode().splitlines()
            gauges = tuple(f"vllm:{name}" for name, *_ in _GAUGES)
            spoilt = [
                f"{line.rpartition(' ')[0]} {word}" if line.startswith(gauges) else line
                for line in lines
            ]
            return 200, ("\n".join(spoilt) + "\n").encode()


_GAUGES = (
    (
        "num_requests_running",
        "Number of requests in model execution batches.",
        lambda state: float(state.running),
    ),
    (
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda state: float(state.waiting + state.arriving),
    ),
    (
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda state: state.usage,
    ),
)
_COUNTERS = (
    (
        "prompt_tokens_total",
        "Number of prefill tokens processed.",
        lambda state: float(state.counters.prompt_tokens),
    ),
    (
        "generation_tokens_total",
        "Number of generation tokens processed.",
        lambda state: float(state.counters.generation_tokens),
    ),
    (
        "prefix_cache_queries_total",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda state: float(state.counters.prefix_queries),
    ),
    (
        "prefix_cache_hits_total",
        "Prefix cache hits, in terms of number of cached tokens.",
        lambda state: float(state.counters.prefix_hits),
    ),
    (
        "external_prefix_cache_hits_total",
        "External prefix cache hits from KV connector cross-instance cache sharing, "
        "in terms of number of cached tokens.",
        lambda state: float(state.counters.pulled_tokens),
    ),
    (
        "num_preemptions_total",
        "Cumulative number of preemption from the engine.",
        lambda state: float(state.counters.preemptions),
    ),
)


@lru_cache(maxsize=10_000)  # Each page has the same ones, 60 for a rank.
def _labels(model: str, rank: int, **more: str) -> str:
    labels = {"engine": str(rank), "model_name": model} | more
    return ",".join(f'{name}="{labels[name]}"' for name in sorted(labels))


def _number(value: float) -> str:
    """Format a number as prometheus_client does: from a million on as Go does."""
    text = repr(value)
    point = text.find(".")
    if value > 0 and point > 6 and "e" not in text:
        mantissa = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{point - 1:02d}"
    return text
