"""The page: self-contained, and alive in a browser if there is one."""

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.live.control.test_admin import SNAPSHOT, Bench, Fleet
from tests.support.site import Exchanged, Site, play, served
from tests.support.virtual.runner import run

from balanceroute.proxy.core.admission import TenantLimits
from balanceroute.proxy.live.control.pages import HEADERS, INTERVAL_S, MAX_VIEWERS, PAGE, LiveView
from balanceroute.proxy.live.control.state import view_of, view_of_tenants
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.request_metrics import Counts
from balanceroute.proxy.live.telemetry.snapshot import LimitsState, RankState, TenantState
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import HttpRequest, Reply
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.virtual.loop import VirtualLoop

    from balanceroute.proxy.wire.messages import Headers

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TEXT = PAGE.decode()


def test_it_takes_nothing_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^\s\"']+", TEXT))
    assert addresses == {"http://www.w3.org/2000/svg"}  # A namespace, which nobody fetches.
    assert not re.findall(r"<(?:link|img|script)[^>]* (?:src|href)=(?!\"data:)", TEXT)


def test_it_is_served_without_a_token_and_runs_its_own_script_alone() -> None:
    answer = Bench().get("/", headers=[])
    assert answer.status == 200
    assert answer.body == PAGE
    policy = dict(HEADERS)[b"content-security-policy"]
    assert answer.headers[b"content-security-policy"] == policy
    assert b"default-src 'none'; script-src 'sha256-" in policy
    assert b"frame-ancestors 'none'" in policy


def test_it_puts_no_text_into_markup() -> None:
    # Names of engines and ids of requests are others' words.
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", TEXT)


class Wide(Fleet):
    """A control with ranks, the last of which has a hostile name and one is drained; and with tenants."""

    def __init__(self, ranks: int, tenants: int) -> None:
        super().__init__()
        names = [f"http://d{number}:8000" for number in range(ranks - 1)] + ["http://<b>x</b>:1"]
        self.shown = replace(
            SNAPSHOT,
            ranks=[
                RankState(i, name, True, "up", 1000 * i, 3, 2, 13, url=name)
                for i, name in enumerate(names)
            ],
            idle_ratios=[None, 0.25] * 30,
            limits=LimitsState(16, 4096, None, 1 << 29),
            tenants=[
                TenantState(f"t{i}", i, 0, {}, TenantLimits(concurrency=tenants), 1 / tenants)
                for i in range(tenants)
            ],
        )
        self.shown.ranks[0] = replace(
            self.shown.ranks[0], status="draining", bound=0, at_barrier=False
        )

    def view(self) -> dict[str, object]:
        metrics = Metrics(lambda: [self.shown])
        tenants = view_of_tenants(self.shown.tenants, {"t7": Counts({"ok": 5, "rejected": 2}, 90)})
        scaling = {"bound_by": "kv_memory", "wanted_prefillers": 3, "wanted_ranks": None}
        seen = view_of(
            self.shown,
            metrics.latencies(),
            Counts({"ok": 41, "upstream_error": 1}, 5000),
            ready=True,
            forbidden="",
            scaling=scaling,
        )
        answers = {"<i>large</i>": (3, 1)}
        alias = {
            "name": "auto",
            "chooser": "greedy",
            "groups": ["<i>large</i>"],
            "answers": answers,
        }
        return {**tenants, "aliases": [alias], **seen}


def test_it_is_told_of_the_tenants_that_have_most_in_flight() -> None:
    seen = Wide(2, 1000).view()
    tenants = cast("list[dict[str, Any]]", seen["tenants"])
    assert seen["tenant_count"] == 1000
    assert [one["name"] for one in tenants] == [f"t{i}" for i in range(936, 1000)]
    few = cast("list[dict[str, Any]]", Wide(2, 9).view()["tenants"])
    assert [one["output_tokens"] for one in few] == [0] * 7 + [90, 0]
    assert few[7]["outcomes"] == {"ok": 5, "rejected": 2}
    assert few[7]["concurrency"] == 9


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(
    ("ranks", "bars", "rows"),
    [(145, 144, 146), pytest.param(4000, 250, 200, marks=pytest.mark.extended)],
)
def test_a_browser_shows_many_ranks(tmp_path: Path, ranks: int, bars: int, rows: int) -> None:
    assert CHROMIUM is not None

    async def main() -> str:
        bench = Bench(Wide(ranks, 1000), token=False)

        def answer(request: HttpRequest, reply: Reply) -> None:
            bench.admin(request, reply)
            if request.path == b"/admin/live":
                reply.end()  # The browser's time stands still while an answer is under way.

        server = Server(answer)
        await server.start("127.0.0.1", 0)
        browser = await asyncio.create_subprocess_exec(
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", "--dump-dom"),
            f"http://127.0.0.1:{server.port}/",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(60.0):
            page, _ = await browser.communicate()
        bench.admin.close()
        server.close()
        await server.drain()
        return page.decode()

    page = asyncio.run(main())
    assert page.count("<title>") == 1 + bars + 30  # The page, bars of ranks, and of idle time.
    assert page.count('aria-label="Drain ') + page.count('aria-label="Take back ') == rows
    assert page.count('<tr data-key="tenant t') == 64
    for told in (
        *("the proxy ended the stream", "drained: http://d0:8000", "64 of 1,000", "999 of 1,000"),
        *("&lt;b&gt;x&lt;/b&gt;", "auto → &lt;i&gt;large&lt;/i&gt;", "33.3 %", "kv memory"),
    ):
        assert told in page, told
    assert "<b>x</b>" not in page
    assert "<i>large</i>" not in page


# The live view: an event every 0.8 s for those who look, and nothing for nobody.


class Viewer:
    """A reply that keeps what is written."""

    def __init__(self) -> None:
        self.closed = self.paused = False
        self.on_closed: Callable[[], None] | None = None
        self.events: list[Any] = []
        self.status = 0

    @property
    def reply(self) -> "Reply":
        return cast("Reply", self)

    def start(self, status: int, headers: "Headers") -> None:
        assert dict(headers)[b"content-type"].startswith(b"text/event-stream")
        self.status = status

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.events.append(json.loads(event_data(data)))

    def end(self) -> None:
        self.closed = True

    def leave(self) -> None:
        self.closed = True
        assert self.on_closed is not None
        self.on_closed()


class Views:
    """Counts how often the view is made."""

    def __init__(self) -> None:
        self.made = 0
        self.error: Exception | None = None

    def __call__(self) -> dict[str, object]:
        if self.error is not None:
            raise self.error
        self.made += 1
        return {"number": self.made}


def test_viewers_share_one_view_and_without_any_none_is_made() -> None:
    views = Views()
    subject = LiveView(views)
    first, second = Viewer(), Viewer()

    async def main(_loop: "VirtualLoop") -> None:
        await asyncio.sleep(10.0)
        assert views.made == 0
        subject.open(first.reply)
        subject.open(second.reply)
        await asyncio.sleep(3.5 * INTERVAL_S)
        assert views.made == 2 + 3
        first.leave()
        await asyncio.sleep(1.0 * INTERVAL_S)
        second.leave()
        await asyncio.sleep(10.0)
        assert views.made == 2 + 3 + 1

    run(main, seed=1, limit_s=100.0)
    assert [one["number"] for one in first.events] == [1, 3, 4, 5]
    assert [one["number"] for one in second.events] == [2, 3, 4, 5, 6]
    assert first.status == 200


def test_a_viewer_that_reads_slowly_is_not_written_to() -> None:
    subject, viewer = LiveView(Views()), Viewer()

    async def main(_loop: "VirtualLoop") -> None:
        subject.open(viewer.reply)
        viewer.paused = True
        await asyncio.sleep(5.5 * INTERVAL_S)
        assert len(viewer.events) == 1
        viewer.paused = False
        await asyncio.sleep(1.0 * INTERVAL_S)
        subject.close()

    run(main, seed=1, limit_s=100.0)
    assert [one["number"] for one in viewer.events] == [1, 7]
    assert viewer.closed


def test_a_view_that_fails_ends_the_streams(caplog: pytest.LogCaptureFixture) -> None:
    views = Views()
    subject, viewer = LiveView(views), Viewer()

    async def main(_loop: "VirtualLoop") -> None:
        subject.open(viewer.reply)
        views.error = RuntimeError("no view")
        await asyncio.sleep(2.0)
        assert viewer.closed
        views.error = None
        another = Viewer()
        subject.open(another.reply)
        assert len(another.events) == 1
        subject.close()

    run(main, seed=1, limit_s=100.0)
    assert "the live view failed" in caplog.text


@served()
async def test_the_admin_listener_shows_the_fleet_live(site: Site) -> None:
    port = site.world.plane.admin.port if site.world.plane.admin else 0
    looking: list[Exchanged] = [
        site.send("/admin/live", method="GET", port=port) for _ in range(MAX_VIEWERS)
    ]
    for one in looking:
        await one.until_events(2)
    refused = await site.send("/admin/live", method="GET", port=port).end()
    assert refused.status == 503
    stream = site.send(
        "/v1/completions",
        {"model": "tiny", "prompt": "t1 t2", "max_tokens": 400, "stream": True},
        headers=[(b"x-request-id", b"mine:1")],
    )
    await stream.until_events(20)
    await asyncio.sleep(2.0)
    state = json.loads(event_data(looking[0].events[-1]))
    assert state["ready"]
    assert state["decoding"] == 1
    assert 20 <= state["output_tokens"] <= 400
    assert state["outcomes"] == {}
    assert state["tenants"] == state["aliases"] == []
    assert len(state["ranks"]) == 2
    assert sum(rank["bound"] for rank in state["ranks"]) == 1
    assert len(state["idle_ratios"]) == 60
    assert sum(state["latencies"]["itl"]["counts"]) > 0
    for where in ("decoding", "ended"):
        found = (await site.admin("/admin/requests?id=mine%3A1")).json["requests"]
        assert [one["state"] for one in found] == [where]
        assert found[0]["rank"] in {rank["name"] for rank in state["ranks"]}
        assert found[0]["transfer_s"] > 0
        await stream.end()
    assert (await site.admin("/admin/requests?id=other")).json == {"requests": []}
    for query in ("", "?id=a&id=b", "?id=a&more=b", "?number=4"):
        assert (await site.admin(f"/admin/requests{query}")).status == 400
    for one in looking:
        one.call.abort()


def test_a_view_that_is_open_does_not_hold_up_the_end() -> None:
    looking: list[Exchanged] = []

    async def scenario(site: Site) -> None:
        assert site.world.plane.admin is not None
        port = site.world.plane.admin.port
        looking.append(site.send("/admin/live", method="GET", port=port))
        await looking[0].until_events(1)
        await site.world.plane.close()
        await looking[0].end()
        assert looking[0].error is None

    play(scenario, at_rest=False)
    assert looking[0].over
