"""The values of a page of engine metrics: how large and how full its KV cache is, and of how many engines.

The page comes from outside and is read with suspicion: only the lines of the few metrics that are
wanted are looked at, and a value that cannot be true refuses the page as a whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.events import EngineLoad

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A longer page is refused. One of vLLM 0.32 has 65 kB for each engine."""

_CACHE_CONFIG = "vllm:cache_config_info"
"""A metric whose value is 1, and whose labels say how the KV cache is configured."""

# vLLM renamed the metric; both are a fraction of 1, whatever "perc" promises.
_KV_CACHE_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_WAITING, _RUNNING = b"vllm:num_requests_waiting", b"vllm:num_requests_running"
_LORA, _MOST_ADAPTERS = b"vllm:lora_requests_info", "max_lora"
_SLEEP_STATE, _AWAKE = b"vllm:engine_sleep_state", "awake"
_LATE_PULLS = b"vllm:nixl_num_notifications_after_expiry_total"
_PROMPT_TOKENS = b"vllm:prompt_tokens_total"
_ASKED_TOKENS = b"vllm:external_prefix_cache_queries_total"
_PULLED_TOKENS = b"vllm:external_prefix_cache_hits_total"
_OUTPUT_TOKENS, _ENDED = b"vllm:generation_tokens_total", b"vllm:request_success_total"
_LMCACHE = b"\nlmcache:"
_NIXL, _NIXL_PULLS = b"\nvllm:nixl_", b"vllm:nixl_num_descriptors_count"
_KV_TOKENS, _BLOCKS, _BLOCK_TOKENS = "kv_cache_size_tokens", "num_gpu_blocks", "block_size"
_CACHE_LABELS = frozenset(
    {_KV_TOKENS, _BLOCKS, _BLOCK_TOKENS, "cache_dtype", "enable_prefix_caching"}
)
_MAX_LINE_BYTES = 4096
_MAX_SAMPLES = 4096  # Of one metric.
_MAX_LABEL_BYTES = 64
_MAX_COUNT = 1e15
# Possessive quantifiers: there is one way to read a line, and no other is tried.
_LABEL = re.compile(
    rb"[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+" rb'"((?:[^"\\]|\\.)*+)"[ \t]*+'
)
_VALUE = re.compile(rb"[ \t]*+([0-9.eE+-]++)(?:[ \t]++-?[0-9]++)?[ \t\r]*+")
_COUNT = re.compile(r"[0-9]{1,9}")
_SLEEP_LABEL = "sleep_state"
_ENGINE, _VLLM_WITHOUT_LABEL = "engine", "0"


class MetricsPageError(BalanceRouteError):
    """A page of metrics that cannot be true."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """The values of a page."""

    kv_cache_usage: float  # 0 to 1; that of the fullest engine.
    # KV caches that were pulled after their lease had ended, since the engine started; None if the
    # page does not say.
    late_pulls: int | None
    # The values of the label `engine`, one for each data-parallel rank; "0" stands for a page
    # without that label.
    engines: frozenset[str]
    # Requests that wait, the mean over its engines; 0 if the page does not say.
    waiting: float = 0.0
    running: float = 0.0  # Requests that run, likewise.
    # KV tokens that an engine holds, of the smallest; None if the page does not say.
    kv_tokens: int | None = None
    loads: Mapping[str, EngineLoad] = field(default_factory=dict)  # How busy each of `engines` is.
    asleep: bool = False  # Whether one of them sleeps; False if the page does not say.
    block_tokens: int | None = None  # Tokens of its KV blocks; None if the page does not say.
    # Adapters that an engine may have in a batch; None if the page does not say.
    max_adapters: int | None = None
    # Output tokens of each of `engines` since it started; without those of which the page does not say.
    output_tokens: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvSigns:
    """The signs of the engine's KV connector on a page; None for a missing one."""

    # As in `EngineGauges`; empty for a page that says nothing.
    engines: frozenset[str] = frozenset()
    computed: float | None = None  # Prompt tokens since the engine's start.
    # Those of which a KV connector was asked. vLLM asks it for each prompt, if it has one.
    asked: float | None = None
    nixl: bool = False  # Whether NIXL has metrics there, as it has from the start.
    pulls: float = 0.0  # KV caches that NIXL pulled.
    pulled: float | None = None  # Prompt tokens whose KV a connector of any kind brought.
    output: float = 0.0  # Output tokens.
    ended: float = 0.0  # Requests that have ended.
    lmcache: bool = False  # Whether LMCache has metrics there.

    @property
    def brought(self) -> float | None:
        """A counter that grows with each KV cache that is pulled; None if the page has none."""
        return self.pulls if self.pulled is None and self.nixl else self.pulled


def kv_signs(page: bytes) -> KvSigns:
    """Read what a page shows of the KV connector.

    Raises:
        MetricsPageError: It is too long, or holds a value that cannot be true.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsPageError(f"more than {MAX_PAGE_BYTES} bytes")
    page = b"\n" + page

    def total(name: bytes) -> float | None:
        values = [value for _, value in _samples(page, name, largest=_MAX_COUNT)]
        return sum(values) if values else None

    engines = (
        engine for name in _KV_CACHE_USAGE for engine, _ in _samples(page, name, largest=1.0)
    )
    return KvSigns(
        frozenset(engines),
        total(_PROMPT_TOKENS),
        total(_ASKED_TOKENS),
        _NIXL in page,
        total(_NIXL_PULLS) or 0.0,
        total(_PULLED_TOKENS),
        total(_OUTPUT_TOKENS) or 0.0,
        total(_ENDED) or 0.0,
        _LMCACHE in page,
    )


def parse_engine_gauges(page: bytes) -> EngineGauges:
    """Read a page in the Prometheus text format, in time linear in its length.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.

    Raises:
        MetricsPageError: It is too long, does not give the use of the KV cache, or holds a value
            that cannot be true.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsPageError(f"more than {MAX_PAGE_BYTES} bytes")
    page = b"\n" + page
    usages = [sample for name in _KV_CACHE_USAGE for sample in _samples(page, name, largest=1.0)]
    if not usages:
        raise MetricsPageError(f"{_KV_CACHE_USAGE[0].decode()} is missing")
    waiting = dict(_samples(page, _WAITING, largest=_MAX_COUNT))
    running = dict(_samples(page, _RUNNING, largest=_MAX_COUNT))
    caches = list(_cache_configs(page))
    return EngineGauges(
        kv_cache_usage=max(value for _, value in usages),
        late_pulls=_late_pulls(page),
        engines=frozenset(engine for engine, _ in usages),
        waiting=_mean(waiting),
        running=_mean(running),
        kv_tokens=min(filter(None, map(kv_tokens_of, caches)), default=None),
        loads={
            engine: EngineLoad(waiting.get(engine, 0.0), running.get(engine, 0.0), usage)
            for engine, usage in usages
        },
        asleep=_sleeps(page),
        block_tokens=min(_counts(caches, _BLOCK_TOKENS), default=None),
        max_adapters=min(
            _counts(_info(page, _LORA, {_MOST_ADAPTERS}), _MOST_ADAPTERS), default=None
        ),
        output_tokens=dict(_samples(page, _OUTPUT_TOKENS, largest=_MAX_COUNT)),
    )


def _sleeps(page: bytes) -> bool:
    for line in _lines(page, _SLEEP_STATE):
        try:
            labels, _ = _labels(line, {_SLEEP_LABEL})
            _, value = _sample(line, 1.0)
        except ValueError as error:
            raise MetricsPageError(f"{_SLEEP_STATE.decode()}: {error}") from error
        if labels.get(_SLEEP_LABEL) == _AWAKE and not value:
            return True
    return False


def _late_pulls(page: bytes) -> int | None:
    values = [value for _, value in _samples(page, _LATE_PULLS, largest=_MAX_COUNT)]
    return int(sum(values)) if values else None


def _mean(by_engine: Mapping[str, float]) -> float:
    return sum(by_engine.values()) / len(by_engine) if by_engine else 0.0


def kv_tokens_of(cache: Mapping[str, str]) -> int | None:
    """Return the KV tokens that an engine holds, of the labels of `_CACHE_CONFIG`; None if unknown.

    vLLM before 0.32 has only blocks and their size, and that is too much where layers differ.
    """
    names = (_KV_TOKENS, _BLOCKS, _BLOCK_TOKENS)
    counts = {name: int(cache[name]) for name in names if _COUNT.fullmatch(cache.get(name, ""))}
    blocks = counts.get(_BLOCKS, 0) * counts.get(_BLOCK_TOKENS, 0)
    return counts.get(_KV_TOKENS, blocks) or None


def cache_configs(page: bytes) -> list[dict[str, str]]:
    """Return how the KV cache of each engine of a page is configured: its sizes and its type.

    Raises:
        MetricsPageError: The page is too long.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsPageError(f"more than {MAX_PAGE_BYTES} bytes")
    return list(_cache_configs(b"\n" + page))


def _cache_configs(page: bytes) -> Iterator[dict[str, str]]:
    yield from _info(page, _CACHE_CONFIG.encode(), _CACHE_LABELS)


def _info(page: bytes, name: bytes, wanted: Set[str]) -> Iterator[dict[str, str]]:
    """Yield some labels of every sample of a metric that says something by its labels."""
    for line in _lines(page, name):
        try:
            labels, _ = _labels(line, wanted)
        except ValueError:
            continue  # It has dozens of labels, and little depends on it.
        yield labels


def _counts(samples: Iterable[Mapping[str, str]], label: str) -> Iterator[int]:
    """Yield the values of a label that are counts of something."""
    for labels in samples:
        value = labels.get(label, "")
        if _COUNT.fullmatch(value) and int(value):
            yield int(value)


def _samples(page: bytes, name: bytes, *, largest: float) -> Iterator[tuple[str, float]]:
    """Yield the engine and the value of every sample of a metric."""
    for line in _lines(page, name):
        try:
            yield _sample(line, largest)
        except ValueError as error:
            raise MetricsPageError(f"{name.decode()}: {error}") from error


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the text behind a metric's name on each of its lines, which begin after a newline."""
    found = 0
    start = page.find(b"\n" + name)
    while start >= 0:
        rest = start + 1 + len(name)
        # One byte too many shows that a line is too long.
        end = page.find(b"\n", rest, rest + _MAX_LINE_BYTES + 1)
        line = page[rest:end] if end >= 0 else page[rest : rest + _MAX_LINE_BYTES + 1]
        # Another metric may begin with this one's name.
        if line[:1] in {b"{", b" ", b"\t"}:
            found += 1
            if found > _MAX_SAMPLES:
                raise MetricsPageError(f"{name.decode()} has over {_MAX_SAMPLES} samples")
            yield line
        start = page.find(b"\n" + name, rest)


def _sample(line: bytes, largest: float) -> tuple[str, float]:
    """Read the text behind a metric's name on its line.

    Raises:
        ValueError: It is not a sample, or one that cannot be true.
    """
    labels, at = _labels(line, {_ENGINE})
    number = _VALUE.fullmatch(line, at)
    # NaN and infinity are spelled with other letters, and so no number here.
    if number is None:
        raise ValueError("not a finite number")
    value = float(number[1])
    if not 0.0 <= value <= largest:
        raise ValueError(f"{value:g} is not in 0..{largest:g}")
    return labels.get(_ENGINE, _VLLM_WITHOUT_LABEL), value


def _labels(line: bytes, wanted: Set[str]) -> tuple[dict[str, str], int]:
    """Return those of some labels that a line has, and where its label set ends.

    Raises:
        ValueError: The line is too long, the label set malformed, or a wanted value too long.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"a line of over {_MAX_LINE_BYTES} bytes")
    found: dict[str, str] = {}
    if not line.startswith(b"{"):
        return found, 0
    at = 1
    while not line.startswith(b"}", at):
        label = _LABEL.match(line, at)
        if label is None:
            raise ValueError("malformed labels")
        at = label.end()
        if line.startswith(b",", at):
            at += 1
        elif not line.startswith(b"}", at):
            raise ValueError("malformed labels")
        name = label[1].decode()
        if name in wanted:
            if len(label[2]) > _MAX_LABEL_BYTES:
                raise ValueError(f"the label {name} is too long")
            found[name] = label[2].decode()
    return found, at + 1
