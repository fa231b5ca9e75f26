"""The observation of a fleet: loads by rank over time, and the figures that follow from them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from balanceroute.proxy.capacity import BoundVerdict, judge
from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.core.setting import file, number
from balanceroute.proxy.lab.validate.validation import Fit, fit_step_time
from balanceroute.proxy.page_client import UnansweredError, root_of

if TYPE_CHECKING:
    from balanceroute.proxy.page_client import PageClient


# The facts on a page of vLLM's or SGLang's metrics of each of its data-parallel ranks.

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
    """A page without the metrics that an audit needs."""


class PageSample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class LengthSums:
    """A histogram of lengths since the engine's start."""

    # By the upper end of the bucket, cumulated.
    counts: dict[float, float] = field(default_factory=dict)
    total: float = 0.0  # Sum of the lengths.


@dataclass(slots=True)
class RankPage:
    """The figures that an engine reports of one rank; None for those that it does not."""

    running: float | None = None  # Requests in its batch.
    waiting: float | None = None  # Requests that wait in the engine.
    kv_tokens: float | None = None  # KV tokens in use.
    generated: float | None = None  # Tokens generated since the start.
    # Lengths of the prompts of requests that ended.
    prompts: LengthSums = field(default_factory=LengthSums)
    outputs: LengthSums = field(default_factory=LengthSums)  # Lengths of their outputs.


def read_page(page: bytes) -> dict[str, RankPage]:
    """Return the figures of a page, by rank; "0" where it names none.

    Raises:
        PageError: It is none of these engines' pages, or lacks the KV tokens in use.
    """
    # An engine's page has 65 kB for each rank, most of it of no interest here.
    lines = [line for line in page.splitlines() if line.startswith(_WANTED)]
    try:
        families = list(text_string_to_metric_families(b"\n".join(lines).decode() + "\n"))
    except ValueError as error:
        raise PageError(f"not a page of metrics: {error}") from error
    return pages_of(
        PageSample(one.name, one.labels, one.value) for family in families for one in family.samples
    )


def pages_of(samples: Iterable[PageSample]) -> dict[str, RankPage]:
    """Return the figures of one engine's samples, by rank; "0" where they name none.

    Raises:
        PageError: They are none of these engines', or lack the running requests.
    """
    values: dict[str, dict[str, float]] = {}
    capacity: dict[str, float | None] = {}
    ranks: dict[str, RankPage] = {}
    for sample in samples:
        # An unknown value, also on a server that keeps samples.
        if not isfinite(sample.value):
            continue
        rank = next((sample.labels[x] for x in _RANK_LABELS if x in sample.labels), "0")
        page = ranks.setdefault(rank, RankPage())
        if sample.name == _CAPACITY:
            capacity[rank] = _capacity(sample.labels)
        elif not _take_length(page, sample.name, sample.labels, checked(sample.name, sample.value)):
            values.setdefault(rank, {})[sample.name] = sample.value
    for rank, page in ranks.items():
        found = values.get(rank, {})
        page.running, page.waiting = _first(found, "running"), _first(found, "waiting")
        page.generated, page.kv_tokens = _first(found, "generated"), _first(found, "kv_tokens")
        usage = _first(found, "usage")
        size = capacity.get(rank)
        if page.kv_tokens is None and usage is not None and size is not None:
            page.kv_tokens = usage * size
    if not ranks or any(page.running is None for page in ranks.values()):
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


def _take_length(page: RankPage, name: str, labels: dict[str, str], value: float) -> bool:
    for kind, family in _HISTOGRAMS.items():
        if name.startswith(family):
            lengths: LengthSums = getattr(page, kind)
            if name == f"{family}_bucket":
                lengths.counts[float(labels["le"])] = value
            elif name == f"{family}_sum":
                lengths.total = value
            return True
    return False


# The line of the step time, from looks at the engines that see no single step.
#
# Between two looks a request that runs emits a token per step, so tokens / running requests is
# the number of steps. Looks that follow each other quickly see two or three, and not their
# fractions: the quotient of two such numbers is too large on average, the more so the fewer steps
# there are, which is where the loads are high. So each point of the fit is a window of many
# steps.

_WINDOW_STEPS = 25.0
"""One step more or less is then 4 % of a window's."""


def fit_looks(
    times_s: NDArray[np.float64],
    peaks: NDArray[np.float64],
    running: NDArray[np.float64],
    generated: NDArray[np.float64],
) -> Fit | None:
    """Return T = a + b x max L, in time of the wall; None if no line fits.

    Args:
        times_s: float64[looks].
        peaks: float64[looks], KV tokens of the fullest rank.
        running: float64[looks], requests in all batches.
        generated: float64[looks], tokens of all ranks since the start.
    """
    seconds, tokens = np.diff(times_s), np.diff(generated)
    at_work = (running[1:] + running[:-1]) / 2
    # Not a number where nothing ran, or an engine does not count its tokens or counts anew. So is the window.
    steps = np.full(len(tokens), np.nan)
    np.divide(tokens, at_work, out=steps, where=(at_work > 0) & (tokens >= 0))
    known_steps = steps[steps >= 0]
    if not known_steps.any():
        return None
    looks = min(len(steps), int(np.ceil(_WINDOW_STEPS / known_steps.mean())))
    of_time, of_steps, of_peaks = (
        np.convolve(values, np.ones(looks), "valid")
        for values in (seconds, steps, steps * (peaks[1:] + peaks[:-1]) / 2)
    )
    known = of_steps > 0
    if not known.any():
        return None
    fit = fit_step_time(
        (of_peaks[known] / of_steps[known]).astype(np.int64), 1e9 * of_time[known] / of_steps[known]
    )
    return None if fit is None or fit.base_ms <= 0 or fit.us_per_token <= 0 else fit


MIN_SAMPLES = 20
_PARTS = 10
_FIGURES = ("running", "waiting", "kv_tokens", "generated")
_MISSING = {
    "kv_tokens": "tells neither its KV tokens in use nor its capacity "
    "(vllm:cache_config_info, sglang:num_used_tokens)",
    "generated": "does not tell the tokens that it generated "
    "(vllm:generation_tokens_total, sglang:generation_tokens_total)",
}
_FULL = 0.95
"""Share of the slots in use from which a rank counts as full: one that ended leaves a gap."""
_MANY_LOOKS = 5.0
"""At which a request runs, so that few join a rank and leave it between two."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all engines: seconds, and the page of each rank, by its name."""

    time_s: float
    decode: Mapping[str, RankPage]
    prefill: Mapping[str, RankPage]


@dataclass(frozen=True, slots=True)
class Observation:
    """The observed figures of a fleet of G ranks."""

    ranks: tuple[str, ...]  # Names, G.
    prefillers: int  # P.
    seconds: float  # From the first look to the last.
    loads: NDArray[np.float64]  # float64[looks, G], KV tokens.
    batch: int  # Slots of a rank: as given, or the most requests that any rank ran.
    # Share of rank time lost at the barrier, by the loads: sum (max L - L_g) / sum G max L.
    idle: float
    idle_error: float  # Its standard error, by the spread between parts of the time.
    mean_load: float  # Mean KV tokens of a rank, over the steps as `idle` is.
    imbalance_tokens: float  # Mean of max L - min L.
    output_tokens_per_s: float  # Of all ranks; NaN if they do not report it.
    running: float  # Mean requests in the batches of all ranks.
    waiting: float  # Mean requests that wait in the decode engines.
    prefilling: float  # Mean requests that run or wait at all prefillers.
    # The line of the step's time over max L, in time of the wall; None if no line fits.
    fit: Fit | None
    # Mean share of prefillers that have a request; None without prefillers.
    prefill_busy: float | None
    prefill_waiting: float  # Mean requests that wait at a prefiller.
    # Time of a prefiller for a prompt token; None if no prefill was seen.
    prefill_ns_per_token: float | None
    prompts: LengthSums  # Lengths of the prompts that ended meanwhile, by bucket.
    longest_prompt: float  # About the longest of them; inf if unknown.
    outputs: LengthSums  # Lengths of their outputs.

    @property
    def slots_share(self) -> float:
        return self.running / (self.batch * len(self.ranks))

    @property
    def verdict(self) -> BoundVerdict:
        return judge(
            prefillers=self.prefillers,
            ranks=len(self.ranks),
            prefill_busy=self.prefill_busy,
            slots_share=self.slots_share,
            idle=self.idle,
        )

    @property
    def saturated(self) -> bool:
        """Whether the ranks were full, so that requests waited for slots."""
        return self.slots_share >= _FULL


def observe(
    looks: Sequence[Look], *, batch: int | None = None, outputs_known: bool = True
) -> Observation:
    """Return the figures of looks at the same engines.

    `batch` is the slots of a rank, None for the most that were in use. A proxy does not report the tokens
    that its ranks generate: then `outputs_known` is false.

    Raises:
        ConfigError: They are too few, ranks do not report what they must, or nothing was decoded.
    """
    looks = _whole(looks)
    if len(looks) < MIN_SAMPLES:
        raise ConfigError(
            f"{len(looks)} looks at all engines are too few, {MIN_SAMPLES} the least: more --minutes"
        )
    ranks = tuple(looks[0].decode)
    loads = _complete(looks, ranks, "kv_tokens")
    running = _series(looks, ranks, "running")
    generated = _counted((_complete if outputs_known else _series)(looks, ranks, "generated"))
    peaks = loads.max(axis=1)
    if not peaks.any():
        raise ConfigError("nothing was decoded meanwhile")
    times = np.array([look.time_s for look in looks])
    fit = fit_looks(times, peaks, running.sum(axis=1), generated.sum(axis=1))
    # A look finds a long step more often than a short one; each step counts once.
    steps = np.ones(len(peaks)) if fit is None else 1.0 / _step_ms(fit, peaks)
    prefillers = tuple(looks[0].prefill)
    prompts, outputs = (_ended(looks, ranks, what) for what in ("prompts", "outputs"))
    queues, work = _series(looks, prefillers, "waiting"), _series(looks, prefillers, "running")
    busy = float((queues + work > 0).mean()) if prefillers else None
    seconds = float(times[-1] - times[0])
    # Those that prefillers ended: where a queue grows or shrinks, ranks ended other ones.
    prefilled = _ended(looks, prefillers, "prompts").total or prompts.total
    return Observation(
        ranks=ranks,
        prefillers=len(prefillers),
        seconds=seconds,
        loads=loads,
        batch=batch or max(1, round(running.max())),
        idle=_idle(loads, steps),
        idle_error=_idle_error(loads, steps),
        mean_load=float(steps @ loads.mean(axis=1) / steps.sum()),
        imbalance_tokens=float((peaks - loads.min(axis=1)).mean()),
        output_tokens_per_s=float((generated[-1] - generated[0]).sum() / seconds),
        running=float(running.sum(axis=1).mean()),
        waiting=float(np.nan_to_num(_series(looks, ranks, "waiting")).sum(axis=1).mean()),
        prefilling=float(np.nan_to_num(queues + work).sum(axis=1).mean()),
        fit=fit,
        prefill_busy=busy,
        prefill_waiting=float(np.nan_to_num(queues).mean()) if prefillers else 0.0,
        prefill_ns_per_token=(
            1e9 * len(prefillers) * busy * seconds / prefilled if busy and prefilled else None
        ),
        prompts=prompts,
        longest_prompt=_longest_prompt(loads, running, outputs),
        outputs=outputs,
    )


def _complete(looks: Sequence[Look], ranks: Sequence[str], what: str) -> NDArray[np.float64]:
    found = _series(looks, ranks, what)
    silent = np.isnan(found).any(axis=0)
    if silent.any():
        raise ConfigError(f"{ranks[int(silent.argmax())]} {_MISSING[what]}")
    return found


def _series(looks: Sequence[Look], ranks: Sequence[str], what: str) -> NDArray[np.float64]:
    """Return float64[looks, ranks]; NaN for a figure that a page lacks."""
    rows = [
        [
            getattr((look.decode if name in look.decode else look.prefill)[name], what)
            for name in ranks
        ]
        for look in looks
    ]
    return np.array(rows, np.float64).reshape(len(looks), len(ranks))


def _whole(looks: Sequence[Look]) -> Sequence[Look]:
    """Leave out looks in which a rank lacks figures that it reports in other looks, as while it starts."""
    figures: dict[str, set[str]] = {}
    for look in looks:
        for name, page in (*look.prefill.items(), *look.decode.items()):
            figures.setdefault(name, set()).update(_figures_of(page))
    return [
        look
        for look in looks
        if all(
            _figures_of(page) == figures[name]
            for name, page in (*look.prefill.items(), *look.decode.items())
        )
    ]


def _figures_of(page: RankPage) -> set[str]:
    values = {name: getattr(page, name) for name in _FIGURES}
    return {name for name, value in values.items() if value is not None and isfinite(value)}


def _counted(counters: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64[looks, ranks] that never fall: the counts since the first look.

    A counter that falls began anew at 0, as its engine was restarted.
    """
    before, after = counters[:-1], counters[1:]
    more = np.where(after < before, after, after - before)
    return np.concatenate([np.zeros_like(counters[:1]), np.cumsum(more, axis=0)])


def _idle(loads: NDArray[np.float64], steps: NDArray[np.float64]) -> float:
    return float(1.0 - steps @ loads.mean(axis=1) / (steps @ loads.max(axis=1)))


def _idle_error(loads: NDArray[np.float64], steps: NDArray[np.float64]) -> float:
    parts = zip(np.array_split(loads, _PARTS), np.array_split(steps, _PARTS), strict=True)
    idle = [_idle(*part) for part in parts if part[0].any()]
    return float(np.std(idle, ddof=1) / len(idle) ** 0.5) if len(idle) > 1 else 0.0


def _longest_prompt(
    loads: NDArray[np.float64], running: NDArray[np.float64], outputs: LengthSums
) -> float:
    """Return the largest growth of a rank's load between two looks, and the mean request's load.

    A long prompt joins in the place of another request. That is right if a request runs for many looks.
    """
    ended = max(outputs.counts.values(), default=0.0)
    lasts_looks = running.sum() / ended if ended else 0.0
    if lasts_looks < _MANY_LOOKS:
        return inf
    return float(np.diff(loads, axis=0).max() + loads.sum() / running.sum())


def _step_ms(fit: Fit, peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    step_ms: NDArray[np.float64] = fit.base_ms + fit.us_per_token / 1e3 * peaks
    return step_ms


def _ended(looks: Sequence[Look], ranks: Sequence[str], what: str) -> LengthSums:
    """Return the lengths of requests that ended between the first look and the last, of some engines."""
    result = LengthSums()
    pages = [{**look.prefill, **look.decode} for look in looks]
    for name in ranks:
        lengths: list[LengthSums] = [getattr(page[name], what) for page in pages]
        for before, after in pairwise(lengths):
            # A restart resets all buckets, so one that fell proves it for all.
            anew = after.total < before.total or any(
                count < before.counts.get(bound, 0.0) for bound, count in after.counts.items()
            )
            since = LengthSums() if anew else before
            result.total += after.total - since.total
            for bound, count in after.counts.items():
                more = count - since.counts.get(bound, 0.0)
                result.counts[bound] = result.counts.get(bound, 0.0) + more
    return result


# Looks at all engines, again and again; nothing is ever sent to a model.

_MOST_FAILURES = 10
"""Looks in a row that may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    minutes: float = number(5.0, "look at a running fleet for so long", 0.1, 1440.0, metavar="N")
    interval_s: float = number(1.0, "between two looks", 0.05, 60.0, metavar="S")
    timeout_s: float = number(5.0, "for one page", 0.1, 60.0, metavar="S")
    ca_file: Path | None = file(
        "verifies the certificates of https:// addresses (default: the system's authorities)"
    )


class Watcher:
    async def watch(
        self, *, seconds: float, interval_s: float, progress: Callable[[int], None]
    ) -> list[Look]:
        """Look every so often for some time; a look that fails does not count.

        Raises:
            ConfigError: The fleet cannot be read.
        """
        loop = asyncio.get_running_loop()
        begin_s, looks, failures = loop.time(), list[Look](), 0
        while loop.time() - begin_s < seconds:
            next_s = loop.time() + interval_s
            try:
                looks.append(await self.look())
                failures = 0
            except PageError as error:
                failures += 1
                if not looks or failures >= _MOST_FAILURES:
                    raise ConfigError(str(error)) from error
            progress(len(looks))
            await asyncio.sleep(max(0.0, next_s - loop.time()))
        return looks

    async def look(self) -> Look:
        """Look once. Raises PageError."""
        raise NotImplementedError


class AuditedEngines(Watcher):
    """The engines of a fleet, by addresses with or without /metrics; ranks in the order of the pages."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], pages: "PageClient") -> None:
        self._prefill = {url: metrics_url("--prefill", url) for url in prefill}
        self._decode = {url: metrics_url("--decode", url) for url in decode}
        self._pages = pages

    async def look(self) -> Look:
        decode, prefill = await asyncio.gather(self._look(self._decode), self._look(self._prefill))
        return Look(asyncio.get_running_loop().time(), decode, prefill)

    async def _look(self, urls: Mapping[str, str]) -> dict[str, RankPage]:
        pages = await asyncio.gather(*(self._page(*one) for one in urls.items()))
        return {
            url if len(page) == 1 else f"{url}@{rank}": one
            for url, page in zip(urls, pages, strict=True)
            for rank, one in page.items()
        }

    async def _page(self, url: str, at: str) -> dict[str, RankPage]:
        try:
            return read_page(await self._pages.page(at))
        except (UnansweredError, PageError) as error:
            raise PageError(f"{url}: {error}") from None


async def look_at(fleet: Watcher, watched: Watched) -> list[Look]:
    """Look at a fleet as asked for, with a line on the terminal meanwhile.

    Raises:
        ConfigError: The fleet cannot be read.
    """
    with Console(stderr=True).status("looking at the engines") as status:
        return await fleet.watch(
            seconds=60.0 * watched.minutes,
            interval_s=watched.interval_s,
            progress=lambda looks: status.update(f"{looks:,} looks at the engines"),
        )


def metrics_url(flag: str, url: str) -> str:
    """Return where a server's metrics are: at its URL, or at /metrics if that has no path.

    Raises:
        ConfigError: It is none.
    """
    try:
        root = root_of(url)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None
    return root if urlsplit(root).path else f"{root}/metrics"
