"""What curl gets from the proxy before emulated engines."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from kits import Result, run
from reporting import outcomes

_BIG_BYTES = 2 << 20


class Curl:
    """The checks with curl. The name of a method is what it claims.

    Args:
        url: The proxy's.
        admin_url: Its admin listener's.
        folder: For bodies.
    """

    def __init__(self, url: str, admin_url: str, folder: Path) -> None:
        self._url = url
        self._admin_url = admin_url
        self._folder = folder
        self._chat = f"{url}/v1/chat/completions"

    def _body(self, text: str = "hello", **values: object) -> str:
        messages = [{"role": "user", "content": text}]
        members = {"model": "emulated", "messages": messages, "max_tokens": 8}
        return json.dumps(members | values)

    def _post(self, body: str, *flags: str) -> str:
        file = self._folder / "body.json"
        file.write_text(body)
        json_type = ("-H", "Content-Type: application/json")
        done = run("curl", "-sS", *json_type, *flags, "--data-binary", f"@{file}", self._chat)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def _decoding(self) -> int:
        page = run("curl", "-sS", f"{self._admin_url}/admin/state").stdout
        return int(json.loads(page)["state"]["decoding"])

    def answer(self) -> None:
        answer = json.loads(self._post(self._body()))
        assert answer["choices"][0]["message"]["content"]

    def stream(self) -> None:
        events = self._post(self._body(stream=True), "-N").split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert len(events) > 3

    def http_1_0(self) -> None:
        text = self._post(self._body(), "--http1.0", "-i")
        assert text.startswith("HTTP/1.1 200")
        assert "content-length" in text.lower()

    def http_1_0_stream(self) -> None:
        text = self._post(self._body(stream=True), "--http1.0", "-i", "-N")
        assert "transfer-encoding" not in text.lower()
        assert text.endswith("data: [DONE]\n\n")

    def expect_100_continue_with_2_mb(self) -> None:
        text = self._post(self._body("x" * _BIG_BYTES), "-v", "-H", "Expect: 100-continue")
        assert "HTTP/1.1 100 Continue" in text
        assert "HTTP/1.1 200" in text
        assert '"finish_reason"' in text

    def chunked_upload(self) -> None:
        answer = json.loads(self._post(self._body(), "-H", "Transfer-Encoding: chunked"))
        assert answer["usage"]["completion_tokens"]

    def keep_alive(self) -> None:
        file = self._folder / "body.json"
        file.write_text(self._body())
        one = ["-H", "Content-Type: application/json", "-d", f"@{file}", "-o", "/dev/null"]
        one += ["-w", "%{http_code} %{num_connects}\n", self._chat]
        done = run("curl", "-sS", *one, "--next", "-sS", *one, "--next", "-sS", *one)
        assert done.stdout.split("\n") == ["200 1", "200 0", "200 0", ""], done.stdout

    def head_of_health(self) -> None:
        done = run("curl", "-sS", "-I", f"{self._url}/health")
        assert done.stdout.startswith("HTTP/1.1 200"), done.stdout

    def error(self) -> None:
        text = self._post('{"model": "emulated", ', "-i")
        assert text.startswith("HTTP/1.1 400")
        assert '"message"' in text

    def interrupted_stream_frees_its_slot(self) -> None:
        file = self._folder / "body.json"
        file.write_text(self._body(stream=True, max_tokens=100_000, ignore_eos=True))
        flags = ["-N", "-m", "1", "-H", "Content-Type: application/json", "-d", f"@{file}"]
        done = run("curl", "-sS", *flags, self._chat)
        assert done.returncode == 28, "it was not interrupted"
        assert done.stdout.count("data: ") > 5
        end_s = time.monotonic() + 2.0
        while self._decoding():
            assert time.monotonic() < end_s, "a slot is still taken"


def check_curl(url: str, admin_url: str, folder: Path) -> Iterator[Result]:
    """Run every check of `Curl`."""
    version = run("curl", "--version").stdout.partition(" (")[0]
    for name, fault in outcomes(Curl(url, admin_url, folder)):
        yield Result(version, name, fault)
