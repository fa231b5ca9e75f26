"""Files that a command writes: found out before its work that they cannot be, and written whole."""

import os
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError


def check_output(flag: str, path: Path | None) -> None:
    """Find out now that a file cannot be written later.

    Raises:
        ConfigError: Its folder is none, it is a folder, or the system does not let us write it.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {path.parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written: permission denied")


def write_output(flag: str, path: Path, text: str) -> None:
    """Write a file; one that is cut short, as on a full disk, is removed.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise ConfigError(f"{flag}: {path}: {error.strerror}") from error
