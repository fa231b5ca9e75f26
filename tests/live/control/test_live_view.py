"""The live view: an event every 0.8 s for those who look, and nothing for nobody."""

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.site import Exchanged, Site, play, served
from tests.support.virtual.runner import run

from balanceroute.proxy.live.control.pages import INTERVAL_S, MAX_VIEWERS, LiveView
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.virtual.loop import VirtualLoop

    from balanceroute.proxy.wire.messages import Headers, Reply


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
