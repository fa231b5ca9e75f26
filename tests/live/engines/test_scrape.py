"""Scraping: what a page of metrics says, whom it makes look full, and what it cannot do to us."""

import asyncio
import random
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.events import EngineLoad
from balanceroute.proxy.live.engines.engine_gauges import (
    MAX_PAGE_BYTES,
    EngineGauges,
    MetricsPageError,
    parse_engine_gauges,
)
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.engines.scrape import Scraper, ScrapeSettings

# As vLLM 0.32 answers; the first lines of a family that is not wanted and a few that are.
VLLM_PAGE = b"""\
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="tiny"} 0.0
vllm:nixl_xfer_time_seconds_created{engine="0",model_name="tiny"} 1.7952300310662553e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 7.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0273972602739726
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",kv_cache_dtype_skip_layers="[]",\
kv_cache_max_concurrency="16.0",kv_cache_size_tokens="16384",num_gpu_blocks="512"} 1.0
"""
USAGE = "vllm:kv_cache_usage_perc"


def test_a_page_of_vllm_is_understood() -> None:
    assert parse_engine_gauges(VLLM_PAGE) == EngineGauges(
        kv_cache_usage=0.0273972602739726,
        late_pulls=None,
        engines=frozenset({"0"}),
        waiting=1.0,
        running=4.0,
        kv_tokens=16_384,
        loads={"0": EngineLoad(1.0, 4.0, 0.0273972602739726)},
        block_tokens=32,
    )


def test_the_fullest_engine_counts() -> None:
    page = "".join(
        f'{USAGE}{{engine="{rank}",model_name="m"}} {rank / 10}\n' for rank in range(8)
    ).encode()
    gauges = parse_engine_gauges(page)
    assert gauges.kv_cache_usage == 0.7
    assert gauges.engines == frozenset("01234567")


@pytest.mark.parametrize(
    ("values", "asleep"),
    [([], False), (["awake 1.0"], False), (["awake 0.0"], True), (["awake 1", "awake 0"], True)],
)
def test_an_engine_tells_that_it_sleeps(values: list[str], asleep: bool) -> None:
    lines = [f"{USAGE} 0.5", 'vllm:engine_sleep_state{sleep_state="discard_all"} 0.0']
    for engine, value in enumerate(values):
        state, said = value.split()
        labels = f'{{engine="{engine}",model_name="m",sleep_state="{state}"}}'
        lines.append(f"vllm:engine_sleep_state{labels} {said}")
    assert parse_engine_gauges("\n".join(lines).encode()).asleep is asleep


@pytest.mark.parametrize("value", ["NaN", "2", "x"])
def test_a_sleep_that_cannot_be_true_refuses_the_page(value: str) -> None:
    line = f'vllm:engine_sleep_state{{sleep_state="awake"}} {value}'
    with pytest.raises(MetricsPageError, match="engine_sleep_state"):
        parse_engine_gauges(f"{USAGE} 0.5\n{line}\n".encode())


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_both_names_of_the_cache_use_are_known(name: str) -> None:
    assert parse_engine_gauges(f"{name} 0.5".encode()).kv_cache_usage == 0.5


@pytest.mark.parametrize(
    ("line", "engine", "usage"),
    [
        (f"{USAGE} 0.5", "0", 0.5),
        (f"{USAGE}{{}} 1", "0", 1.0),
        (f"{USAGE}\t0", "0", 0.0),
        (f'{USAGE}{{engine="3",}} 5e-1', "3", 0.5),
        (f'{USAGE}{{ engine = "3" , a="b" }} .5', "3", 0.5),
        (f'{USAGE}{{model_name="a\\"}} 9,engine=\\"7",engine="1"}} 0.25', "1", 0.25),
        (f'{USAGE}{{model_name="\\\\",engine="2"}} +0.25', "2", 0.25),
        (f"{USAGE} 0.5 1395066363000", "0", 0.5),
        (f"{USAGE} 0.5\r", "0", 0.5),
    ],
)
def test_lines_in_every_legal_form_are_read(line: str, engine: str, usage: float) -> None:
    gauges = parse_engine_gauges(f"# x\n{line}\n".encode())
    assert gauges.engines == {engine}
    assert gauges.kv_cache_usage == usage


@pytest.mark.parametrize(
    "line",
    [
        *(f"{USAGE} {value}" for value in ("NaN", "Inf", "+Inf", "-Inf", "inf", "nan", "1_0")),
        *(f"{USAGE} {value}" for value in ("-0.1", "1.01", "1e308", "1e999", "55.0", "", "x")),
        *(f"{USAGE} {value}" for value in ("0.5 x", "0.5 1 2", "e", "--1", "0x1")),
        f'{USAGE}{{engine="0" 0.5',
        f'{USAGE}{{engine="0}} 0.5',
        f"{USAGE}{{engine=0}} 0.5",
        f'{USAGE}{{engine="0" model_name="m"}} 0.5',
        f'{USAGE}{{,engine="0"}} 0.5',
        f'{USAGE}{{engine="{"9" * 65}"}} 0.5',
        f'{USAGE}{{model_name="{"m" * 5000}"}} 0.5',
        f"{USAGE} 0.5{' ' * 5000}",
        f"{USAGE} 0.5\nvllm:nixl_num_notifications_after_expiry_total -1",
        f"{USAGE} 0.5\nvllm:nixl_num_notifications_after_expiry_total 1e16",
        f"{USAGE} 0.5\nvllm:nixl_num_notifications_after_expiry_total NaN",
        "vllm:num_requests_running 1",
        f"# {USAGE} 0.5",
        f"{USAGE}_sum 0.5",
        f"x{USAGE} 0.5",
        "<html>",
        "",
    ],
)
def test_a_page_that_cannot_be_true_is_refused(line: str) -> None:
    with pytest.raises(MetricsPageError):
        parse_engine_gauges(f"{line}\n".encode())


def test_a_page_of_too_many_engines_is_refused() -> None:
    lines = [f'{USAGE}{{engine="{rank}"}} 0.5\n' for rank in range(4097)]
    assert len(parse_engine_gauges("".join(lines[:-1]).encode()).engines) == 4096
    with pytest.raises(MetricsPageError, match="over 4096 samples"):
        parse_engine_gauges("".join(lines).encode())


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(MetricsPageError):
        parse_engine_gauges(f'{USAGE}{{engine="'.encode() + b'\xff"} 0.5\n')


def test_a_page_over_the_cap_is_refused() -> None:
    page = VLLM_PAGE + b"#" * (MAX_PAGE_BYTES - len(VLLM_PAGE))
    parse_engine_gauges(page)
    with pytest.raises(MetricsPageError, match="more than 4194304 bytes"):
        parse_engine_gauges(page + b"#")


@pytest.mark.parametrize(
    "piece",
    [
        b"\n" + USAGE.encode(),
        b"\n" + USAGE.encode() + b"{",
        b'\n%b{a="' % USAGE.encode(),
        b"\n" + USAGE.encode() + b" 0.5",
        b"\n",
        b"\\",
        b'"',
    ],
)
def test_no_page_takes_long(piece: bytes) -> None:
    # 4 MiB of what the reader looks for take milliseconds; were any of it quadratic, hours.
    prefix = USAGE.encode() + b'{a="'
    page = (prefix + piece * (MAX_PAGE_BYTES // len(piece)))[:MAX_PAGE_BYTES]
    began = time.process_time()
    with pytest.raises(MetricsPageError):
        parse_engine_gauges(page)
    assert time.process_time() - began < 2.0


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
@example(b"{")
@example(b'{a="')
@example(b" ")
def test_garbage_is_read_or_refused_and_nothing_else(garbage: bytes) -> None:
    for page in (garbage, USAGE.encode() + garbage, b"\n" + USAGE.encode() + b"{" + garbage):
        try:
            gauges = parse_engine_gauges(page)
        except MetricsPageError:
            continue
        assert 0.0 <= gauges.kv_cache_usage <= 1.0


PREFILLERS = [Target(Role.PREFILL, f"http://p{number}:8000") for number in range(3)]
DECODER = Target(Role.DECODE, "http://d0:8000")


def gauges(usage: float, late_pulls: int | None = None) -> EngineGauges:
    return EngineGauges(usage, late_pulls, frozenset({"0"}))


class Bench:
    """A Scraper with a clock that stands until it is moved."""

    def __init__(self, *targets: Target) -> None:
        self.now_s = 100.0
        self.told: list[tuple[str, float]] = []
        self.failures: list[tuple[str, str]] = []
        self.late: list[tuple[str, int]] = []
        self.answers: dict[Target, float | str | None] = {}  # A use, a failure, or it hangs.
        self.fetched: list[tuple[float, Target]] = []
        self.scraper = Scraper(
            ScrapeSettings(1.0, scrape_timeout_s=0.5),
            fetch=self._no_fetch,
            on_utilisation=lambda target, value: self.told.append((target.url, value)),
            on_failure=lambda target, reason: self.failures.append((target.url, reason)),
            on_gauges=self._on_gauges,
            on_error=lambda what, error: pytest.fail(f"{what}: {error!r}"),
            clock=lambda: self.now_s,
            rng=random.Random(1),
        )
        for target in targets:
            self.scraper.add(target)

    def _on_gauges(self, target: Target, _: EngineGauges, late: int) -> None:
        if late:
            self.late.append((target.url, late))

    async def _no_fetch(self, _url: str) -> bytes:
        raise AssertionError("nothing is fetched here")

    def go(self, seconds: float) -> None:
        """Let time pass, tick by tick; every scrape is answered at once."""
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.tick()

    def tick(self) -> None:
        for target in self.scraper.due():
            self.fetched.append((self.now_s, target))
            match self.answers.get(target):
                case float(usage):
                    self.scraper.scraped(target, gauges(usage))
                case str(reason):
                    self.scraper.failed(target, reason)
                case None:
                    pass

    def utilisation(self) -> dict[str, float]:
        return dict(self.told)


def test_changes_are_told_once() -> None:
    bench = Bench(*PREFILLERS[:1])
    bench.answers[PREFILLERS[0]] = 0.4
    bench.go(10)
    assert bench.told == [("http://p0:8000", 0.4)]
    bench.answers[PREFILLERS[0]] = 0.6
    bench.go(10)
    assert bench.told == [("http://p0:8000", 0.4), ("http://p0:8000", 0.6)]


def test_late_pulls_are_told_as_they_come() -> None:
    bench = Bench(*PREFILLERS[:1])
    target = PREFILLERS[0]
    for count in (7, 7, None, 7, 9, 9):
        bench.scraper.scraped(target, gauges(0.5, count))
    assert bench.late == [(target.url, 2)]
    bench.scraper.failed(target, "gone")
    # It was started again, and counts from 0.
    for count in (0, 1, 1, 4):
        bench.scraper.scraped(target, gauges(0.5, count))
    assert bench.late[1:] == [(target.url, 1), (target.url, 3)]


def test_late_pulls_of_all_ranks_are_read() -> None:
    name = "vllm:nixl_num_notifications_after_expiry"
    page = f'{USAGE} 0.1\n{name}_total{{engine="0"}} 2.0\n{name}_total{{engine="1"}} 1.0\n'
    page += f'{name}_created{{engine="0"}} 1.7e9\n'
    assert parse_engine_gauges(page.encode()).late_pulls == 3


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (['block_size="16",num_gpu_blocks="100"'], 1_600),
        (['block_size="16",kv_cache_size_tokens="800",num_gpu_blocks="100"'], 800),
        (['kv_cache_size_tokens="800"', 'kv_cache_size_tokens="700"'], 700),
        (['block_size="16",num_gpu_blocks="None",kv_cache_size_tokens="None"'], None),
        (['block_size="16"'], None),
        (['block_size="16",num_gpu_blocks="-3"'], None),
        # What cannot be read says nothing; the page is as good as without it.
        (["block_size=16,num_gpu_blocks=100"], None),
        ([f'kv_cache_size_tokens="{"9" * 65}"'], None),
    ],
)
def test_the_memory_of_an_engine_is_read_where_it_tells(
    labels: list[str], tokens: int | None
) -> None:
    lines = [f"vllm:cache_config_info{{{one}}} 1.0" for one in labels]
    page = "\n".join([f"{USAGE} 0.1", *lines, ""])
    assert parse_engine_gauges(page.encode()).kv_tokens == tokens


def test_the_blocks_and_the_adapters_of_an_engine_are_read_where_it_tells() -> None:
    cache = 'vllm:cache_config_info{block_size="%s",engine="0"} 1.0'
    lora = 'vllm:lora_requests_info{max_lora="%s",running_lora_adapters="a, b"} 1.7e9'
    for block, adapters, expected in (
        ("16", "4", (16, 4)),
        ("None", "-1", (None, None)),
        ("0", "0", (None, None)),
        ("9" * 65, "9" * 65, (None, None)),
    ):
        page = "\n".join([f"{USAGE} 0.1", cache % block, lora % adapters, ""])
        gauges = parse_engine_gauges(page.encode())
        assert (gauges.block_tokens, gauges.max_adapters) == expected
    page = "\n".join([f"{USAGE} 0.1", cache % 64, cache % 16, lora % 8, lora % 2, ""])
    gauges = parse_engine_gauges(page.encode())
    assert (gauges.block_tokens, gauges.max_adapters) == (16, 2)


def test_a_failed_scrape_makes_an_instance_look_full() -> None:
    bench = Bench(*PREFILLERS)
    bench.answers = dict.fromkeys(PREFILLERS, 0.4)
    bench.go(3)
    bench.answers[PREFILLERS[1]] = "status 500"
    bench.go(1.5)
    assert bench.utilisation() == {
        "http://p0:8000": 0.4,
        "http://p1:8000": 1.0,
        "http://p2:8000": 0.4,
    }
    assert bench.failures[0] == ("http://p1:8000", "status 500")
    bench.answers[PREFILLERS[1]] = 0.2
    bench.go(1.5)
    assert bench.utilisation()["http://p1:8000"] == 0.2


def test_a_scrape_that_hangs_goes_stale_after_three_intervals() -> None:
    bench = Bench(*PREFILLERS)
    bench.answers = dict.fromkeys(PREFILLERS, 0.4)
    bench.go(3)
    bench.answers[PREFILLERS[1]] = None
    bench.go(1.8)
    assert bench.utilisation()["http://p1:8000"] == 0.4
    bench.go(1.5)
    assert bench.utilisation()["http://p1:8000"] == 1.0


def test_a_new_instance_counts_as_empty_until_its_first_deadline() -> None:
    bench = Bench(*PREFILLERS)
    bench.answers = {PREFILLERS[0]: 0.4, PREFILLERS[1]: "refused"}
    bench.go(2.9)
    assert bench.utilisation() == {"http://p0:8000": 0.4}
    bench.go(0.3)
    assert bench.utilisation() == {
        "http://p0:8000": 0.4,
        "http://p1:8000": 1.0,
        "http://p2:8000": 1.0,
    }


def test_if_no_page_of_a_role_can_be_read_its_engines_count_as_empty() -> None:
    bench = Bench(*PREFILLERS, DECODER)
    bench.answers = dict.fromkeys([*PREFILLERS, DECODER], 0.4)
    bench.go(3)
    bench.answers |= dict.fromkeys(PREFILLERS, "status 500")
    bench.go(3)
    assert bench.utilisation() == {target.url: 0.0 for target in PREFILLERS} | {DECODER.url: 0.4}


def test_a_value_that_never_changes_is_fine() -> None:
    bench = Bench(*PREFILLERS[:2])
    bench.answers = dict.fromkeys(PREFILLERS, 0.4)
    bench.go(60)
    assert len(bench.told) == 2


def test_a_stall_makes_nobody_stale() -> None:
    bench = Bench(*PREFILLERS)
    bench.answers = dict.fromkeys(PREFILLERS, 0.4)
    bench.go(3)
    bench.now_s += 30
    bench.answers = {}
    bench.tick()
    assert set(bench.utilisation().values()) == {0.4}
    bench.go(2)
    assert set(bench.utilisation().values()) == {0.4}


def test_each_instance_is_scraped_once_in_an_interval() -> None:
    bench = Bench(*PREFILLERS[:1])
    bench.answers = {PREFILLERS[0]: 0.4}
    bench.go(30)
    assert 27 <= len(bench.fetched) <= 32


def test_a_removed_instance_is_not_scraped() -> None:
    bench = Bench(*PREFILLERS)
    bench.answers = dict.fromkeys(PREFILLERS, 0.4)
    bench.scraper.remove(PREFILLERS[0])
    bench.go(3)
    assert PREFILLERS[0] not in {target for _, target in bench.fetched}


def test_an_instance_is_scraped_once_at_a_time() -> None:
    bench = Bench(*PREFILLERS)
    bench.go(30)
    assert sorted(target.url for _, target in bench.fetched) == [one.url for one in PREFILLERS]


def test_instances_removed_while_they_are_scraped_are_not_missed() -> None:
    gate = asyncio.Event()
    fetched: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        async def fetch(url: str) -> bytes:
            fetched.append(url)
            # Of those due in the same tick this one is the first to begin.
            scraper.remove(PREFILLERS[1])
            await gate.wait()
            return b"nonsense"

        scraper = Scraper(
            ScrapeSettings(1.0, scrape_timeout_s=100.0),
            fetch=fetch,
            on_utilisation=lambda *_: pytest.fail("nothing changes"),
            on_failure=lambda *_: pytest.fail("nobody asks any more"),
            on_gauges=lambda *_: None,
            on_error=lambda what, error: pytest.fail(f"{what}: {error!r}"),
            clock=loop.time,
            rng=random.Random(1),
        )
        for target in PREFILLERS[:2]:
            scraper.add(target)
        task = loop.create_task(scraper.run())
        await asyncio.sleep(0.05)
        scraper.remove(PREFILLERS[0])
        scraper.add(PREFILLERS[0])
        gate.set()
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    run(main, seed=1)
    assert fetched == ["http://p0:8000/metrics"]


def test_running_scrapes_pages_and_survives_what_they_do() -> None:
    told: dict[str, float] = {}
    failures: dict[str, str] = {}
    bad_pages = {
        "http://bad0:8000/metrics": b"vllm:kv_cache_usage_perc NaN\n",
        "http://bad1:8000/metrics": b"x" * (MAX_PAGE_BYTES + 1),
    }

    async def fetch(url: str) -> bytes:
        if url == "http://dead:8000/metrics":
            raise FetchError(Fault.CONNECT, "refused")
        if url == "http://hung:8000/metrics":
            await asyncio.Event().wait()
        return bad_pages.get(url, VLLM_PAGE)

    async def main(loop: VirtualLoop) -> None:
        scraper = Scraper(
            ScrapeSettings(1.0, scrape_timeout_s=1.0),
            fetch=fetch,
            on_utilisation=lambda target, value: told.update({target.url: value}),
            on_failure=lambda target, reason: failures.update({target.url: reason}),
            on_gauges=lambda *_: None,
            on_error=lambda what, error: pytest.fail(f"{what}: {error!r}"),
            clock=loop.time,
            rng=random.Random(1),
        )
        for name in ("good", "bad0", "bad1", "dead", "hung", "gone"):
            scraper.add(Target(Role.PREFILL, f"http://{name}:8000"))
        task = loop.create_task(scraper.run())
        await asyncio.sleep(0.05)
        scraper.remove(Target(Role.PREFILL, "http://gone:8000"))
        await asyncio.sleep(10)
        assert not task.done()
        task.cancel()

    run(main, seed=1)
    assert told == {
        "http://good:8000": 0.0273972602739726,
        "http://bad0:8000": 1.0,
        "http://bad1:8000": 1.0,
        "http://dead:8000": 1.0,
        "http://hung:8000": 1.0,
    }
    assert failures == {
        "http://bad0:8000": "vllm:kv_cache_usage_perc: not a finite number",
        "http://bad1:8000": "more than 4194304 bytes",
        "http://dead:8000": "connect: refused",
        "http://hung:8000": "no page within 1 s",
    }
