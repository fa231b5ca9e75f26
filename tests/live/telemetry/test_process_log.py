"""The process log: JSON lines, no secrets, and no message that can break it."""

import json
import logging
from collections.abc import Iterator

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import as_secret
from balanceroute.proxy.live.telemetry.process_log import LOGGER, set_log_level, set_up_process_log

logger = logging.getLogger(f"{LOGGER}.tests")


@pytest.fixture
def lines() -> Iterator[list[bytes]]:
    root = logging.getLogger(LOGGER)
    before = (root.handlers, root.level, root.propagate)
    written: list[bytes] = []
    secrets = [as_secret(b"sk-123"), as_secret(b"sk-12345")]
    set_up_process_log(written.append, level="info", secrets=secrets)
    yield written
    root.handlers, root.level, root.propagate = before
    root.setLevel(before[1])


def test_a_message_is_one_line_of_json(lines: list[bytes]) -> None:
    logger.warning("lost %s", "an engine", extra={"fields": {"rank": 3, "role": "decode"}})
    (line,) = lines
    assert line.endswith(b"\n")
    fields = json.loads(line)
    time = fields.pop("time")
    assert time.endswith("+00:00")
    assert fields == {
        "event": "lost_an_engine",
        "level": "warning",
        "logger": "balanceroute.tests",
        "message": "lost an engine",
        "rank": 3,
        "role": "decode",
    }


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("serving", "serving"),
        ("KV cache events lost", "kv_cache_events_lost"),
        ("a decision failed; service goes on", "a_decision_failed"),
        ("paused as before: no prefill starts until POST /resume", "paused_as_before"),
        ("admin: added an instance", "admin_added_an_instance"),
        ("admin: refused: no token", "admin_refused"),
        ("a" * 100, "a" * 64),
        ("\n\x7f", ""),
    ],
)
def test_the_event_is_the_first_clause_as_a_name(
    message: str, event: str, lines: list[bytes]
) -> None:
    logger.info(message)
    assert json.loads(lines[0])["event"] == event


def test_control_characters_are_escaped(lines: list[bytes]) -> None:
    logger.info("a\n\x1b[2J\x7f", extra={"fields": {"peer": "b\r\n"}})
    assert all(0x20 <= byte < 0x7F for byte in lines[0][:-1])
    assert json.loads(lines[0])["message"] == "a\n\x1b[2J\x7f"


def test_secrets_are_blacked_out_everywhere(lines: list[bytes]) -> None:
    try:
        int("Bearer sk-12345")
    except ValueError:
        logger.exception("engine said sk-123!", extra={"fields": {"header": b"sk-12345"}})
    assert b"sk-" not in lines[0]
    fields = json.loads(lines[0])
    assert fields["message"] == "engine said [redacted]!"
    # The longer secret as a whole, not what is left of it.
    assert "'Bearer [redacted]'" in fields["exception"]


def test_levels_choose_what_is_logged(lines: list[bytes]) -> None:
    logger.debug("unseen")
    set_log_level("debug")
    logger.debug("seen")
    set_log_level("error")
    logger.warning("unseen")
    assert [json.loads(line)["message"] for line in lines] == ["seen"]


def test_an_unknown_level_is_refused_and_changes_nothing(lines: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="'loud': expected debug, info, warning, error"):
        set_log_level("loud")
    logger.info("seen")
    assert len(lines) == 1


def test_values_that_json_lacks_become_text(lines: list[bytes]) -> None:
    logger.info("m", extra={"fields": {"limit": float("inf"), "none": None, "share": 0.5}})
    fields = json.loads(lines[0])
    assert (fields["limit"], fields["none"], fields["share"]) == ("inf", None, 0.5)


def test_a_broken_message_does_not_reach_its_caller(
    lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.info("%d", "not a number")
    logger.info("next")
    assert len(lines) == 1


def test_nothing_is_written_twice(
    lines: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached_root: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", reached_root.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logger.error("once")
    assert len(lines) == 1
    assert reached_root == []
    captured = capsys.readouterr()
    assert not captured.out
    assert not captured.err
