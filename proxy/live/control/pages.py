"""Pages of the admin listener: how it answers, the live view, orders for groups and pauses."""

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.resources import files
from urllib.parse import parse_qsl, urlencode

import msgspec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.orders import (
    MAX_WAIT_S,
    ConflictError,
    OrderRefusal,
    UnknownInstanceError,
    read_order,
)
from balanceroute.proxy.live.control.pausing import Pausing
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.routes import FANNED_OUT
from balanceroute.proxy.live.security import Secret
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply

# The state every 0.8 s, as server-sent events, to each open page. Without one nothing runs.

MAX_VIEWERS = 8
"""The admin listener has few connections, and orders need some."""
INTERVAL_S = 0.8
"""Between two events. So that 95 of 100 changes are seen within a second."""
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]
"""The headers of the stream."""

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)

Routes = dict[bytes, dict[bytes, Callable[[HttpRequest, Reply], None]]]
"""By path and method."""


class LiveView:
    """Sends what `view` returns to all viewers."""

    def __init__(self, view: Callable[[], dict[str, object]]) -> None:
        self._view = view
        self._viewers: dict[Reply, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """Whether there are as many viewers as may be."""
        return len(self._viewers) >= MAX_VIEWERS

    def open(self, viewer: Reply) -> None:
        """Send to one more viewer until it leaves."""
        event = self._event()  # Before the head, which could not be taken back.
        viewer.start(200, EVENTS)
        viewer.on_closed = lambda: self._leave(viewer)
        self._viewers[viewer] = None
        viewer.write(event)
        if self._timer is None:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for viewer in list(self._viewers):
            viewer.end()
        self._viewers.clear()

    def _leave(self, viewer: Reply) -> None:
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self.close()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def _tick(self) -> None:
        try:
            event = self._event()
        except Exception:
            _log.exception("admin: the live view failed")
            self.close()
            return
        for viewer in self._viewers:
            if not viewer.paused:
                viewer.write(event)
        self._wait()

    def _event(self) -> bytes:
        return b"data: " + _encode(self._view()) + b"\n\n"


COMMON_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


def begin(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Begin work that is among some tasks until it is done."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@contextmanager
def answering(reply: Reply) -> Iterator[None]:
    """Turn an exception into an error answer."""
    try:
        yield
    except OrderRefusal as error:
        _send_error(reply, error)
    except ConfigError as error:
        _send_error(reply, OrderRefusal(400, str(error)))
    except UnknownInstanceError as error:
        _send_error(reply, OrderRefusal(404, str(error)))
    except ConflictError as error:
        _send_error(reply, OrderRefusal(409, str(error)))
    except Exception:
        _log.exception("admin: a page failed")
        _send_error(reply, OrderRefusal(500, "internal error; the log says more"))


def send_json(reply: Reply, status: int, value: object) -> None:
    body = json.dumps(value, default=as_json, allow_nan=False, separators=(",", ":")).encode()
    reply.send(status, [*JSON_HEADERS, *COMMON_HEADERS], body)


def saying(say: Callable[[HttpRequest], object]) -> Callable[[HttpRequest, Reply], None]:
    """Return a handler that answers a request at once, with the value of `say`."""
    return lambda request, reply: send_json(reply, 200, say(request))


def where(request: HttpRequest, order: dict[str, object] | None = None) -> dict[str, object]:
    """Return what the log says of a request: where it came from and what it asked for."""
    asked = {} if order is None else {"order": json.dumps(order)}
    return {"fields": {"peer": request.peer, **asked}}


def _send_error(reply: Reply, error: OrderRefusal) -> None:
    reply.send(
        error.status,
        [*JSON_HEADERS, *COMMON_HEADERS, *error.headers],
        error_body(error.status, error.message, param=error.param),
    )


def as_json(value: object) -> object:
    """Return what `json` can write for a value it cannot: records by field, all else as text."""
    if is_dataclass(value) and not isinstance(value, type | Secret):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


# The pages of the admin listener that pause, resume, abort, and send engines to sleep: see
# `pausing.py`.
#
#     POST /pause            ?mode=abort or wait, &clear_cache=, &engines=false, &timeout_s=
#     POST /resume           ?engines=false
#     GET  /is_paused        {"is_paused"}
#     POST /abort_requests   {"request_ids"?}: those, or all
#     POST /sleep            ?level=0, 1 or 2, &mode=abort or wait, &timeout_s=
#     POST /wake_up          ?tags=weights, &tags=kv_cache: a part of it
#     GET  /is_sleeping      {"is_sleeping"}: as is_paused
#     POST /flush_cache      sglang's name of /reset_prefix_cache
#     POST of FANNED_OUT     ?timeout_s=; the rest of the query, and the body, are the engines'
#
# 200 if every engine carried its order out, else 502. The orders stay in force in both cases, and the
# body has each engine's answer.

ABORT = b"/abort_requests"
PATHS = frozenset(
    {
        *(b"/pause", b"/resume", b"/is_paused", ABORT),
        *(b"/sleep", b"/wake_up", b"/is_sleeping"),
        *(b"/flush_cache", *(path.encode() for path in FANNED_OUT)),
    }
)
_MEANT = {b"/flush_cache": "/reset_prefix_cache"}
_MOST_TAGS = 8
_MOST_IDS = 10_000
_WAIT_S = 600.0
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class PausePages:
    """Serves them.

    Args:
        check_places: Raises Refusal if one more may not be waited for long.
    """

    def __init__(
        self,
        pausing: Pausing,
        tasks: set[asyncio.Task[None]],
        check_places: Callable[[], None],
    ) -> None:
        self._pausing = pausing
        self._check_places = check_places
        self._tasks = tasks
        self.routes: Routes = {
            b"/pause": {b"POST": self._pause},
            b"/resume": {b"POST": self._resume},
            b"/is_paused": {b"GET": saying(partial(self._paused, "is_paused"))},
            ABORT: {b"POST": self._abort},
            b"/sleep": {b"POST": self._sleep},
            b"/wake_up": {b"POST": self._wake_up},
            b"/is_sleeping": {b"GET": saying(partial(self._paused, "is_sleeping"))},
            b"/flush_cache": {b"POST": self._fan_out},
            **{path.encode(): {b"POST": self._fan_out} for path in FANNED_OUT},
        }

    def _pause(self, request: HttpRequest, reply: Reply) -> None:
        asked = asked_of(request, "mode", "clear_cache", "engines", "timeout_s")
        self._check_places()
        self._begin(
            request,
            reply,
            self._pausing.pause(
                asked.get("mode", "abort"),
                clear_cache=_flag(asked, "clear_cache"),
                engines=_flag(asked, "engines"),
                limit_s=_seconds(asked, "timeout_s"),
            ),
        )

    def _resume(self, request: HttpRequest, reply: Reply) -> None:
        asked = asked_of(request, "engines")
        self._begin(request, reply, self._pausing.resume(engines=_flag(asked, "engines")))

    def _paused(self, name: str, request: HttpRequest) -> dict[str, bool]:
        asked_of(request)
        return {name: self._pausing.paused}

    def _sleep(self, request: HttpRequest, reply: Reply) -> None:
        asked = asked_of(request, "level", "mode", "timeout_s")
        self._check_places()
        level = asked.get("level", "1")
        if not (level.isascii() and level.isdigit()):
            raise OrderRefusal(400, "level must be 0, 1 or 2", param="level")
        limit_s = _seconds(asked, "timeout_s")
        work = self._pausing.sleep(int(level[:9]), asked.get("mode", "abort"), limit_s=limit_s)
        self._begin(request, reply, work)

    def _wake_up(self, request: HttpRequest, reply: Reply) -> None:
        pairs = _pairs(request)
        if len(pairs) > _MOST_TAGS or any(name != "tags" for name, _ in pairs):
            raise OrderRefusal(400, f"the page takes tags, at most {_MOST_TAGS}")
        self._begin(request, reply, self._pausing.wake_up([tag for _, tag in pairs]))

    def _abort(self, request: HttpRequest, reply: Reply) -> None:
        asked_of(request)
        order = read_order(request, required=set(), optional={"request_ids"})
        ids = order.get("request_ids")
        if ids is not None and not (
            isinstance(ids, list) and len(ids) <= _MOST_IDS and all(isinstance(i, str) for i in ids)
        ):
            message = f"request_ids must be a list of at most {_MOST_IDS:,} texts"
            raise OrderRefusal(400, message, param="request_ids")
        self._begin(request, reply, self._pausing.abort(ids))

    def _fan_out(self, request: HttpRequest, reply: Reply) -> None:
        pairs = _pairs(request)
        body = request.body or b"{}"
        if request.body:
            read_order(request, required=set(), optional=None)
        limits = [one for one in pairs if one[0] == "timeout_s"]
        if len(limits) > 1:
            raise OrderRefusal(400, "timeout_s stands twice", param="timeout_s")
        limit_s = _seconds(dict(limits), "timeout_s")
        self._check_places()
        query = urlencode([(name, value) for name, value in pairs if name != "timeout_s"])
        path = _MEANT.get(request.path) or request.path.decode()
        path += f"?{query}" if query else ""
        self._begin(request, reply, self._pausing.fan_out(path, body, limit_s=limit_s))

    def _begin(
        self, request: HttpRequest, reply: Reply, work: Awaitable[dict[str, object]]
    ) -> None:
        async def carry_out() -> None:
            with answering(reply):
                done = await work
                engines = done["engines"]
                assert isinstance(engines, list)
                status = 200 if all(one["status"] == 200 for one in engines) else 502
                words = {"peer": request.peer, "path": request.path.decode(), "status": status}
                _log.info("admin: %s", done["status"], extra={"fields": words})
                send_json(reply, status, done)

        begin(self._tasks, carry_out())


def _pairs(request: HttpRequest) -> list[tuple[str, str]]:
    return parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)


def asked_of(request: HttpRequest, *known: str) -> dict[str, str]:
    """Return the members of a query. Raises Refusal: one is unknown, or stands twice."""
    pairs = _pairs(request)
    asked = dict(pairs)
    if len(asked) < len(pairs) or not asked.keys() <= set(known):
        raise OrderRefusal(400, f"the page takes {', '.join(known) or 'no query'}, each once")
    return asked


def _flag(asked: dict[str, str], name: str) -> bool:
    """Return a flag, which is true unless it is said. Raises Refusal: it is none."""
    said = _FLAGS.get(asked.get(name, "true").lower())
    if said is None:
        raise OrderRefusal(400, f"{name} must be true or false", param=name)
    return said


def _seconds(asked: dict[str, str], name: str) -> float:
    try:
        value = float(asked.get(name, _WAIT_S))
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_WAIT_S:
        raise OrderRefusal(400, f"{name} must be from 0 to {MAX_WAIT_S:g}", param=name)
    return value


# The page of the admin listener: one file with its style and script, and nothing from elsewhere.

PAGE = files(__package__).joinpath("page.html").read_bytes()
"""The page, as UTF-8."""


def _hash(tag: bytes) -> str:
    inside = PAGE.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
    return base64.b64encode(hashlib.sha256(inside).digest()).decode()


# It runs no other script, asks no other server, and no other page can frame it and steal clicks.
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_hash(b'script')}'; "
    f"style-src 'sha256-{_hash(b'style')}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
]
"""Of the answer."""
