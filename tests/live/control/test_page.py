"""The page: self-contained, and alive in a browser if there is one."""

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.live.control.test_admin import SNAPSHOT, Bench, Fleet

from balanceroute.proxy.live.control.pages import HEADERS, PAGE
from balanceroute.proxy.live.control.state import view_of
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.snapshot import LimitsState, RankState, Snapshot
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import HttpRequest, Reply

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
    """A control with 144 ranks, one of which has a hostile name."""

    def view(self) -> dict[str, object]:
        names = [f"http://d{number}:8000" for number in range(143)] + ["http://<b>x</b>:1"]
        ranks = [
            RankState(i, name, True, "up", 1000 * i, 3, 2, 13, url=name)
            for i, name in enumerate(names)
        ]
        state = _with_ranks(ranks)
        return view_of(state, Metrics(lambda: [state]).latencies(), ready=True, forbidden="")


def _with_ranks(ranks: list[RankState]) -> Snapshot:
    limits = LimitsState(16, 4096, None, 1 << 29)
    return replace(SNAPSHOT, ranks=ranks, idle_ratios=[None, 0.25] * 30, limits=limits)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_144_ranks(tmp_path: Path) -> None:
    assert CHROMIUM is not None

    async def main() -> str:
        bench = Bench(Wide(), token=False)

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
    assert page.count("<title>") == 1 + 144 + 30  # The page, bars of ranks, and of idle time.
    assert page.count("Drain decode") == 144
    assert "the proxy ended the stream" in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>x</b>" not in page
