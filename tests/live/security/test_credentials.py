"""Keys: read from files that nobody else can open, and shown nowhere."""

import os
from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import (
    MAX_FILE_BYTES,
    Secret,
    as_secret,
    matches_any,
    read_secret,
    read_secrets,
)


def write(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_holds_a_key_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, b"# clients\nsk-one\n\n  sk-two  \r\nsk-three")
    assert read_secrets(path) == (Secret(b"sk-one"), Secret(b"sk-two"), Secret(b"sk-three"))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_secrets(write(tmp_path, b"\xef\xbb\xbfsk-one\nsk-two\n")) == (
        Secret(b"sk-one"),
        Secret(b"sk-two"),
    )


def test_a_group_may_read_a_file_of_keys(tmp_path: Path) -> None:
    assert read_secret(write(tmp_path, b"sk-one\n", 0o640)) == Secret(b"sk-one")


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_file_of_keys_open_to_all_is_refused(mode: int, tmp_path: Path) -> None:
    path = write(tmp_path, b"sk-one\n", mode)
    with pytest.raises(ConfigError, match=rf"is {path}: open to every user \(chmod o= {path};"):
        read_secrets(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file holds no key"),
        (b"# nothing\n \n", "the file holds no key"),
        (b"sk-one\nhunter2 x\n", "line 2: a key has 1 to 1024 visible ASCII characters"),
        (b"hunter2\x00\n", "line 1: a key has"),
        (b"hunter2\xff\n", "line 1: a key has"),
        (b"hunter2" * 200, "line 1: a key has"),
        (b"hunter2\nsk\nhunter2\n", "line 3 repeats line 1"),
        (b"#" * (MAX_FILE_BYTES + 1), f"larger than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_file_without_good_keys_is_refused_without_showing_them(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as refused:
        read_secrets(path)
    assert str(refused.value).startswith(f"is {path}: {reason}")
    assert "hunter2" not in str(refused.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: No such file"):
        read_secrets(tmp_path / "absent")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_secrets(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="pipe: not a regular file"):
        read_secrets(tmp_path / "pipe")


def test_a_single_key_is_not_one_of_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds several keys, must hold one"):
        read_secret(write(tmp_path, b"a\nb\n"))


def test_a_key_is_not_in_its_repr() -> None:
    assert "hunter2" not in repr(Secret(b"hunter2"))
    assert "hunter2" not in f"{Secret(b'hunter2')}"
    assert "hunter2" not in repr([Secret(b"hunter2")])


def test_a_key_matches_itself_alone() -> None:
    secret = as_secret(b"sk-one")
    assert secret.matches(b"sk-one")
    for other in (b"", b"sk-on", b"sk-one ", b"SK-ONE", b"sk-one\xff"):
        assert not secret.matches(other)


def test_one_of_several_keys_is_enough() -> None:
    secrets = [Secret(b"a"), Secret(b"b")]
    assert matches_any(secrets, b"a")
    assert matches_any(secrets, b"b")
    assert not matches_any(secrets, b"c")
    assert not matches_any([], b"")
