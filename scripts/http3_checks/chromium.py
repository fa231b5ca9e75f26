"""Chromium as a client of HTTP/3: pages' own `fetch`, driven over the browser's debugging pipe.

Source: https://chromedevtools.github.io/devtools-protocol/ (Target, Page, Runtime).
"""

import base64
import fcntl
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from exchange import HOST, PATH, Asked, Got, got, headers_of

from balanceroute.proxy.core.errors import BalanceRouteError

_LIMIT_S = 120.0
_CLOSE_S = 10.0
_AT_ONCE = 50
_PAGE = "/health"
_END = b"\0"
# The browser reads commands from descriptor 3 and writes to descriptor 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FREE = 5
# Bodies as base64: text would be decoded.
_ASK = """
(async () => {
  performance.setResourceTimingBufferSize(1e6);
  const answers = await Promise.all(%s.map(async one => {
    const answer = await fetch(%s, {method: "POST", headers: one.headers, body: one.body});
    const bytes = new Uint8Array(await answer.arrayBuffer());
    const text = Array.from(bytes, byte => String.fromCharCode(byte)).join("");
    return {status: answer.status, headers: [...answer.headers], body: btoa(text)};
  }));
  const asked = performance.getEntriesByType("resource").filter(
    one => one.initiatorType === "fetch");
  performance.clearResourceTimings();
  return {answers, protocols: asked.map(one => one.nextHopProtocol)};
})()
"""


class ChromiumError(BalanceRouteError):
    """The browser ended, is silent, or did not speak HTTP/3."""


def over_chromium(program: Path, port: int, cert: Path, asked: Sequence[Asked]) -> list[Got]:
    """Ask with `fetch` of a page that the proxy itself serves.

    Args:
        program: The browser: chromium, chrome or chromium-headless-shell.
        port: Where the proxy speaks HTTP/3; nothing need listen for TCP there.
        cert: Its certificate, which must be of a kind that browsers take: not Ed25519.
        asked: What to send.

    Raises:
        ChromiumError: The browser failed, or an answer did not come over HTTP/3.
    """
    answers: list[Got] = []
    with tempfile.TemporaryDirectory() as folder, _browser(program, port, cert, folder) as pipe:
        targets = pipe.ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = pipe.ask("Target.attachToTarget", targetId=page, flatten=True)
        pipe.session = attached["sessionId"]
        pipe.ask("Page.enable")
        opened = pipe.ask("Page.navigate", url=f"https://{HOST}:{port}{_PAGE}")
        if "errorText" in opened:
            raise ChromiumError(f"Chromium cannot open the page: {opened['errorText']}")
        pipe.wait_for("Page.loadEventFired")
        for begin in range(0, len(asked), _AT_ONCE):
            answers += _ask(pipe, asked[begin : begin + _AT_ONCE])
    return answers


def _ask(pipe: "_Pipe", asked: Sequence[Asked]) -> list[Got]:
    requests = [
        {
            "headers": {name.decode(): value.decode() for name, value in headers_of(one)},
            "body": one.body.decode(),
        }
        for one in asked
    ]
    told = pipe.ask(
        "Runtime.evaluate",
        expression=_ASK % (json.dumps(requests), json.dumps(PATH.decode())),
        awaitPromise=True,
        returnByValue=True,
    )
    if "exceptionDetails" in told:
        raise ChromiumError(f"the page failed: {told['exceptionDetails']}")
    value = told["result"]["value"]
    if value["protocols"] != ["h3"] * len(asked):
        raise ChromiumError(f"answers came over {sorted(set(value['protocols']))}, not h3 alone")
    return [
        got(
            one["status"],
            [(name.encode(), text.encode("latin-1")) for name, text in one["headers"]],
            base64.b64decode(one["body"]),
        )
        for one in value["answers"]
    ]


def _key_hash(cert: Path) -> str:
    """Return the hash by which Chromium is told to trust a certificate."""
    key = x509.load_pem_x509_certificate(cert.read_bytes()).public_key()
    told = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(told).digest()).decode()


class _Pipe:
    """Commands to a browser, and what it says.

    Attributes:
        session: The page that commands are for; empty for the browser itself.
    """

    def __init__(self, write: int, read: int) -> None:
        self.session = ""
        self._write, self._read = write, read
        self._text = b""
        self._number = 0
        self._events: list[str] = []

    def ask(self, method: str, **values: object) -> Any:
        """Return the result of a command. Raises ChromiumError."""
        self._number += 1
        command: dict[str, object] = {"id": self._number, "method": method, "params": values}
        if self.session:
            command["sessionId"] = self.session
        os.write(self._write, json.dumps(command).encode() + _END)
        while True:
            message = self._next(method)
            if message.get("id") == self._number:
                if "error" in message:
                    raise ChromiumError(f"{method}: {message['error']}")
                return message["result"]

    def wait_for(self, event: str) -> None:
        """Return once something has happened since the last call. Raises ChromiumError."""
        while event not in self._events:
            self._next(event)
        self._events.clear()

    def _next(self, wanted: str) -> dict[str, Any]:
        ends_s = time.monotonic() + _LIMIT_S
        while _END not in self._text:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read], [], [], left_s)[0]:
                raise ChromiumError(f"Chromium says nothing for {_LIMIT_S:g} s: {wanted}")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ChromiumError("Chromium ended; start it by hand to see why")
            self._text += part
        text, _, self._text = self._text.partition(_END)
        message: dict[str, Any] = json.loads(text)
        self._events += [message["method"]] if "method" in message else []
        return message


@contextmanager
def _browser(program: Path, port: int, cert: Path, folder: str) -> Iterator[_Pipe]:
    """Start a browser; end it in the end."""
    flags = [
        "--headless",
        "--remote-debugging-pipe",
        "--no-sandbox",  # It needs rights that containers lack; only our own proxy is visited.
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--enable-quic",
        f"--origin-to-force-quic-on={HOST}:{port}",
        f"--ignore-certificate-errors-spki-list={_key_hash(cert)}",
        "about:blank",
    ]
    commands, write = os.pipe()
    read, answers = os.pipe()
    try:
        # The launcher's numbers must not be those that it moves them to.
        own = [fcntl.fcntl(one, fcntl.F_DUPFD, _FREE) for one in (commands, answers)]
        launcher = [sys.executable, "-c", _LAUNCH, *map(str, own), str(program)]
        with subprocess.Popen(
            [*launcher, *flags], pass_fds=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            for one in (commands, answers, *own):
                os.close(one)
            try:
                pipe = _Pipe(write, read)
                yield pipe
                pipe.session = ""
                pipe.ask("Browser.close")
                process.wait(_CLOSE_S)
            finally:
                process.kill()
    finally:
        os.close(write)
        os.close(read)
