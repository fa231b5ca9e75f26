"""The process log: what happens to the proxy itself, one JSON object a line.

Fields: `time` (UTC, ISO 8601), `event`, `level`, `logger`, `message`, `exception` if there was one, and
what the call gave as `extra={"fields": {...}}`. `event` is the first clause of the message as a name, of
which there are few. Lines are plain ASCII without control characters.
"""

import logging
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import isfinite
from typing import Final

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security.credentials import Secret
from balanceroute.proxy.live.telemetry.json_line import json_line

LOGGER: Final = "balanceroute"
"""The logger above all of this package's."""

LEVELS: Final = ("debug", "info", "warning", "error")
"""The names of the levels, the most talkative first."""

MAX_MESSAGE = 8192
"""Characters of a message or a traceback that are written; the rest is cut off."""

_REDACTED = "[redacted]"
_MAX_EVENT = 64
# Where the first clause of a message ends; that of an administrator's order is the second.
_CLAUSE = re.compile(r"(?<!^admin): |; | \(")
_NO_NAME = re.compile(r"[^a-z0-9]+")


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON, without the secrets that it knows."""

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        super().__init__()
        self._secrets: list[str] = []
        self.redact_too(secrets)

    def redact_too(self, secrets: Iterable[Secret]) -> None:
        """Black out these keys as well from now on."""
        texts = {secret.value.decode("latin-1") for secret in secrets}
        # Longest first: one may be part of another.
        self._secrets = sorted(texts.union(self._secrets), key=lambda text: (-len(text), text))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its newline."""
        message = self._clean(record.getMessage())
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "event": _event_of(str(message)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            fields["exception"] = self._clean(self.formatException(record.exc_info))
        extra = getattr(record, "fields", {})
        fields.update({name: self._clean(value) for name, value in extra.items()})
        return json_line(fields).decode("ascii").removesuffix("\n")

    def _clean(self, value: object) -> object:
        if (
            value is None
            or isinstance(value, int)
            or (isinstance(value, float) and isfinite(value))
        ):
            return value
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, _REDACTED)
        return text[:MAX_MESSAGE]


def _event_of(message: str) -> str:
    clause = _CLAUSE.split(message, maxsplit=1)[0]
    return _NO_NAME.sub("_", clause.lower()).strip("_")[:_MAX_EVENT]


class LineHandler(logging.Handler):
    """Hands formatted records to a sink that does not block."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record over."""
        try:
            self._write(self.format(record).encode("ascii") + b"\n")
        except Exception:
            # What a message does wrong must not end the request that logged it.
            self.handleError(record)


def set_up_process_log(
    write: Callable[[bytes], object],
    *,
    level: str,
    secrets: Iterable[Secret] = (),
) -> None:
    """Send the package's log to a sink, as JSON, and nowhere else.

    Args:
        write: Takes one line with its newline, and does not block.
        level: One of `LEVELS`.
        secrets: Keys to black out wherever they appear.

    Raises:
        ConfigError: The level is unknown.
    """
    set_log_level(level)
    handler = LineHandler(write)
    handler.setFormatter(JsonFormatter(secrets))
    logger = logging.getLogger(LOGGER)
    logger.handlers = [handler]
    logger.propagate = False


def redact_too(secrets: Iterable[Secret]) -> None:
    """Black out these keys as well from now on."""
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.redact_too(secrets)


def set_log_level(level: str) -> None:
    """Change how much is logged.

    Raises:
        ConfigError: The level is unknown.
    """
    if level not in LEVELS:
        raise ConfigError(f"the log level is {level!r}: expected {', '.join(LEVELS)}")
    logging.getLogger(LOGGER).setLevel(level.upper())


def log_level(*, other_than: str) -> str:
    """Return the level that was set last; empty if it is `other_than`, or if none was set."""
    level = logging.getLogger(LOGGER).level
    name = logging.getLevelName(level).lower() if level else other_than
    return "" if name == other_than else name
