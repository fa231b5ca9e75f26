"""The pages of the admin listener that pause, resume, abort, and send engines to sleep: see `pausing.py`.

    POST /pause            ?mode=abort or wait, &clear_cache=, &engines=false, &timeout_s=
    POST /resume           ?engines=false
    GET  /is_paused        {"is_paused"}
    POST /abort_requests   {"request_ids"?}: those, or all
    POST /sleep            ?level=0, 1 or 2, &mode=abort or wait, &timeout_s=
    POST /wake_up          ?tags=weights, &tags=kv_cache: a part of it
    GET  /is_sleeping      {"is_sleeping"}: as is_paused

200 if every engine did as it was told, else 502. The orders stand in both cases, and the body tells what
each engine answered.
"""

import asyncio
import logging
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from balanceroute.proxy.live.control.answers import Reply, answering, begin, send_json
from balanceroute.proxy.live.control.orders import MAX_WAIT_S, Refusal, read_order
from balanceroute.proxy.wire.messages import Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from balanceroute.proxy.live.control.pausing import Pausing

PATHS = frozenset(
    {
        *(b"/pause", b"/resume", b"/is_paused", b"/abort_requests"),
        *(b"/sleep", b"/wake_up", b"/is_sleeping"),
    }
)
_MOST_TAGS = 8
_MOST_IDS = 10_000
_WAIT_S = 600.0
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_log = logging.getLogger(__name__)


class PausePages:
    """Serves them.

    Args:
        pausing: Carries out the orders.
        tasks: Those that do so.
        check_places: Raises Refusal if one more may not be waited for long.

    Attributes:
        routes: By path and method.
    """

    def __init__(
        self,
        pausing: "Pausing",
        tasks: set[asyncio.Task[None]],
        check_places: "Callable[[], None]",
    ) -> None:
        self._pausing = pausing
        self._check_places = check_places
        self._tasks = tasks
        self.routes: dict[bytes, dict[bytes, Callable[[Request, Reply], None]]] = {
            b"/pause": {b"POST": self._pause},
            b"/resume": {b"POST": self._resume},
            b"/is_paused": {b"GET": self._is_paused},
            b"/abort_requests": {b"POST": self._abort},
            b"/sleep": {b"POST": self._sleep},
            b"/wake_up": {b"POST": self._wake_up},
            b"/is_sleeping": {b"GET": self._is_sleeping},
        }

    def _pause(self, request: Request, reply: Reply) -> None:
        asked = _query(request, "mode", "clear_cache", "engines", "timeout_s")
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

    def _resume(self, request: Request, reply: Reply) -> None:
        asked = _query(request, "engines")
        self._begin(request, reply, self._pausing.resume(engines=_flag(asked, "engines")))

    def _is_paused(self, request: Request, reply: Reply) -> None:
        _query(request)
        send_json(reply, 200, {"is_paused": self._pausing.paused})

    def _sleep(self, request: Request, reply: Reply) -> None:
        asked = _query(request, "level", "mode", "timeout_s")
        self._check_places()
        level = asked.get("level", "1")
        if not (level.isascii() and level.isdigit()):
            raise Refusal(400, "level must be 0, 1 or 2", param="level")
        limit_s = _seconds(asked, "timeout_s")
        work = self._pausing.sleep(int(level[:9]), asked.get("mode", "abort"), limit_s=limit_s)
        self._begin(request, reply, work)

    def _wake_up(self, request: Request, reply: Reply) -> None:
        pairs = _pairs(request)
        if len(pairs) > _MOST_TAGS or any(name != "tags" for name, _ in pairs):
            raise Refusal(400, f"the page takes tags, at most {_MOST_TAGS}")
        self._begin(request, reply, self._pausing.wake_up([tag for _, tag in pairs]))

    def _is_sleeping(self, request: Request, reply: Reply) -> None:
        _query(request)
        send_json(reply, 200, {"is_sleeping": self._pausing.paused})

    def _abort(self, request: Request, reply: Reply) -> None:
        _query(request)
        order = read_order(request, required=set(), optional={"request_ids"})
        ids = order.get("request_ids")
        if ids is not None and not (
            isinstance(ids, list) and len(ids) <= _MOST_IDS and all(isinstance(i, str) for i in ids)
        ):
            message = f"request_ids must be a list of at most {_MOST_IDS:,} texts"
            raise Refusal(400, message, param="request_ids")
        self._begin(request, reply, self._pausing.abort(ids))

    def _begin(self, request: Request, reply: Reply, work: "Awaitable[dict[str, object]]") -> None:
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


def _pairs(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)


def _query(request: Request, *known: str) -> dict[str, str]:
    """Return the members of a query. Raises Refusal: one is unknown, or stands twice."""
    pairs = _pairs(request)
    asked = dict(pairs)
    if len(asked) < len(pairs) or not asked.keys() <= set(known):
        raise Refusal(400, f"the page takes {', '.join(known) or 'no query'}, each once")
    return asked


def _flag(asked: dict[str, str], name: str) -> bool:
    """Return a flag, which is true unless it is said. Raises Refusal: it is none."""
    said = _FLAGS.get(asked.get(name, "true").lower())
    if said is None:
        raise Refusal(400, f"{name} must be true or false", param=name)
    return said


def _seconds(asked: dict[str, str], name: str) -> float:
    try:
        value = float(asked.get(name, _WAIT_S))
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_WAIT_S:
        raise Refusal(400, f"{name} must be from 0 to {MAX_WAIT_S:g}", param=name)
    return value
