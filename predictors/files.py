"""Predictors in files: a JSON document, and beside it one file for each long text.

    {"format": "balanceroute-predictor", "version": 1, "kind": "survival", "fields": {..},
     "texts": {"stage1": {"file": "model.stage1.0f3a9c51d2e4.txt", "sha256": ".."}}}

A text's file carries the beginning of its digest in its name, so that a new text never replaces one
that the present document names: the document's rename is the one instant at which the new predictor
takes the old one's place. Whatever fails before leaves the old one whole; the texts that only the
old document named are removed afterwards.
"""

import hashlib
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NoReturn

from balanceroute.predictors.kinds import KINDS
from balanceroute.predictors.state import Savable, State, StateError
from balanceroute.proxy.core.errors import BalanceRouteError

FORMAT = "balanceroute-predictor"
VERSION = 1
# Of each file, the document and every text. A full exact-match table takes a tenth of it.
MAX_BYTES = 256 * 2**20
MAX_TEXTS = 16

_DIGEST_CHARACTERS = 12
_TEXT_NAME = re.compile(r"[a-z0-9_]{1,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PredictorFileError(BalanceRouteError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def save(path: str | PathLike[str], predictor: Savable) -> None:
    """Write a predictor's state, whole or not at all.

    Args:
        path: The document to create or replace; the texts go into the same folder.

    Raises:
        PredictorFileError: It cannot be written; what was there before still is.
    """
    write_state(path, predictor.state())


def write_state(path: str | PathLike[str], state: State) -> list[Path]:
    """Write a state, whole or not at all; `save` in two halves, for a thread that may wait for disks.

    Returns:
        The document and its texts: they belong together.

    Raises:
        PredictorFileError: It cannot be written; what was there before still is.
    """
    path = Path(path)
    contents, document = _encoded(path, state)
    superseded = _texts_named_by(path) - contents.keys()
    written: list[Path] = []
    try:
        for name, content in contents.items():
            text = path.with_name(name)
            if not text.exists():
                written.append(text)
            _replace(text, content)
        # The document must not outlast the files that it names.
        _sync_folder(path)
        _replace(path, document)
    except OSError as error:
        for text in written:
            with suppress(OSError):
                text.unlink()
        raise PredictorFileError(path, f"cannot be written: {_why(error)}") from error
    for name in superseded:
        with suppress(OSError):
            path.with_name(name).unlink()
    try:
        _sync_folder(path)
    except OSError as error:
        raise PredictorFileError(path, f"written, but may not last: {_why(error)}") from error
    return [path, *(path.with_name(name) for name in contents)]


def load(path: str | PathLike[str]) -> Savable:
    """Read a predictor that `save` wrote.

    Raises:
        PredictorFileError: It cannot be read, is damaged, or is no predictor of this version.
        ConfigError: It needs a library that is not installed.
    """
    path = Path(path)
    state = read_state(path)
    if state.kind not in KINDS:
        raise PredictorFileError(path, f"unknown kind of predictor: {state.kind[:40]!r}")
    try:
        return KINDS[state.kind].restored(state)
    except StateError as error:
        raise PredictorFileError(path, str(error)) from error


def read_state(path: str | PathLike[str]) -> State:
    """Read a state without restoring the predictor.

    Raises:
        PredictorFileError: It cannot be read, is damaged, or is no state of this version.
    """
    path = Path(path)
    document = _parsed(path, _read(path))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PredictorFileError(path, f'not a predictor: no "format": "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise PredictorFileError(path, "'version' must be a positive integer")
    if version > VERSION:
        raise PredictorFileError(
            path, f"version {version} is newer than this program, which reads up to {VERSION}"
        )
    for key, expected in (("kind", str), ("fields", dict), ("texts", dict)):
        value = document.get(key)
        if type(value) is not expected:
            raise PredictorFileError(
                path, f"{key!r} must be a {expected.__name__}, not {type(value).__name__}"
            )
    entries = document["texts"]
    if len(entries) > MAX_TEXTS:
        raise PredictorFileError(path, f"names {len(entries)} texts, over {MAX_TEXTS}")
    texts = {name: _read_text(path, name, entry) for name, entry in entries.items()}
    return State(document["kind"], document["fields"], texts)


def _encoded(path: Path, state: State) -> tuple[dict[str, bytes], bytes]:
    """Return the contents of the text files by name, and of the document."""
    contents: dict[str, bytes] = {}
    entries: dict[str, dict[str, str]] = {}
    if not path.name:
        raise PredictorFileError(path, "cannot be written: not the name of a file")
    for name in state.texts:
        if not _TEXT_NAME.fullmatch(name):
            raise PredictorFileError(path, f"cannot be written: no name of a text: {name!r}")
    try:
        for name, text in state.texts.items():
            content = text.encode()
            sha256 = hashlib.sha256(content).hexdigest()
            file = f"{path.stem}.{name}.{sha256[:_DIGEST_CHARACTERS]}.txt"
            contents[file] = content
            entries[name] = {"file": file, "sha256": sha256}
        document = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "kind": state.kind,
                "fields": state.fields,
                "texts": entries,
            },
            allow_nan=False,
        ).encode()
    except (TypeError, ValueError) as error:
        raise PredictorFileError(path, f"cannot be written: {error}") from error
    for name, content in (*contents.items(), (path.name, document)):
        if len(content) > MAX_BYTES:
            raise PredictorFileError(
                path, f"cannot be written: {name} would take {len(content)} bytes, over {MAX_BYTES}"
            )
    return contents, document + b"\n"


def _replace(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, at one instant."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _sync_folder(path: Path) -> None:
    """Make the names in the folder of `path` last."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _texts_named_by(path: Path) -> set[str]:
    """Return the text files that `save` made for the document that is there, if there is one."""
    try:
        document = _parsed(path, _read(path))
    except PredictorFileError:
        return set()
    texts = document.get("texts") if isinstance(document, dict) else None
    entries = texts.values() if isinstance(texts, dict) else ()
    files = {entry.get("file") for entry in entries if isinstance(entry, dict)}
    own = re.compile(rf"{re.escape(path.stem)}\.[a-z0-9_]+\.[0-9a-f]{{{_DIGEST_CHARACTERS}}}\.txt")
    return {file for file in files if isinstance(file, str) and own.fullmatch(file)}


def _read_text(path: Path, name: str, entry: object) -> str:
    """Return a text that the document at `path` names."""
    match entry:
        case {"file": str(file), "sha256": str(sha256)} if _SHA256.fullmatch(sha256):
            pass
        case _:
            raise PredictorFileError(path, f"text {name[:40]!r} must have a file and its sha256")
    # Beside the document and nowhere else: a document is not to choose what is read.
    if Path(file).name != file or file in {"", ".", ".."} or "\0" in file or "\\" in file:
        raise PredictorFileError(
            path, f"text {name[:40]!r} is not a plain file name: {file[:80]!r}"
        )
    beside = path.with_name(file)
    content = _read(beside)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise PredictorFileError(beside, f"damaged: not the text that {path.name} names (sha256)")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise PredictorFileError(beside, f"not UTF-8: {error.reason}") from error


def _read(path: Path) -> bytes:
    """Return the content of a regular file of a bounded size."""
    try:
        # A pipe would block the open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PredictorFileError(path, "not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PredictorFileError(path, f"cannot be read: {_why(error)}") from error
    except ValueError as error:
        # A path with a NUL.
        raise PredictorFileError(path, f"cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise PredictorFileError(path, f"over {MAX_BYTES} bytes")
    return content


def _parsed(path: Path, content: bytes) -> object:
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise PredictorFileError(path, f"not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise PredictorFileError(path, "not JSON: nested too deeply") from error
    except ValueError as error:
        raise PredictorFileError(path, f"not JSON, or cut off: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _why(error: OSError) -> str:
    return error.strerror or str(error)
