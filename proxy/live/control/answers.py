"""How the admin listener answers."""

import asyncio
import json
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.control.live_view import Viewer
from balanceroute.proxy.live.control.orders import Refusal
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS, error_body
from balanceroute.proxy.live.security.credentials import Secret
from balanceroute.proxy.wire.messages import Headers

COMMON_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

_log = logging.getLogger(__name__)


class Reply(Viewer, Protocol):
    """Where an answer goes; it ignores what comes after the client left."""

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer."""
        ...


def begin(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Begin work that is among some tasks until it is done."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@contextmanager
def answering(reply: Reply) -> Iterator[None]:
    """Turn what is raised into an error answer."""
    try:
        yield
    except Refusal as error:
        _send_error(reply, error)
    except ConfigError as error:
        _send_error(reply, Refusal(400, str(error)))
    except UnknownInstanceError as error:
        _send_error(reply, Refusal(404, str(error)))
    except ConflictError as error:
        _send_error(reply, Refusal(409, str(error)))
    except Exception:
        _log.exception("admin: a page failed")
        _send_error(reply, Refusal(500, "internal error; the log says more"))


def send_json(reply: Reply, status: int, value: object) -> None:
    """Send a whole answer."""
    body = json.dumps(value, default=as_json, allow_nan=False, separators=(",", ":")).encode()
    reply.send(status, [*JSON_HEADERS, *COMMON_HEADERS], body)


def _send_error(reply: Reply, error: Refusal) -> None:
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
