"""Clients as people use them, against a proxy that runs: the openai package, curl, a load tool.

    python scripts/check_clients.py [--without-load-tool]

Makes a virtual environment in build/clients-venv on its first run (openai and aiperf, 1.2 GB from the
package index), starts two proxies before emulated engines (`balanceroute up`), and prints a table of
what works. Exits 1 if anything does not.
"""

import argparse
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.soak.audit import held_by_proxy

ROOT = Path(__file__).parents[1]
VENV = ROOT / "build" / "clients-venv"
PACKAGES = ("openai", "aiperf")
TOPOLOGY = "emulated-2p8d"
KEY = "sk-for-the-check"
_READY = re.compile(r"listening on (http://\S+), admin on (http://\S+)\n")
_READY_S = 30.0
_CLIENT_S = 120.0
_INSTALL_S = 1200.0
_BIG_BYTES = 2 << 20
_LOAD_REQUESTS = 60
# A tokeniser of bytes, so that the load tool asks nobody for one.
_TOKENISER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters | {"<eos>": len(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Result:
    """One check: which client, what, and what went wrong; None if nothing did."""

    client: str
    check: str
    fault: str | None


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its URL, and its admin listener's."""

    url: str
    admin_url: str


def run(*command: object, limit_s: float = _CLIENT_S) -> subprocess.CompletedProcess[str]:
    """Run a command; its exit status is in the result."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)


def make_venv(packages: Sequence[str]) -> Path:
    """Return the Python of an environment that has the packages."""
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
    present = run(python, "-m", "pip", "freeze").stdout.lower()
    missing = [name for name in packages if f"\n{name}==" not in f"\n{present}"]
    if missing:
        print(f"installing {' '.join(missing)} into {VENV}", flush=True)
        done = run(python, "-m", "pip", "install", "-q", *missing, limit_s=_INSTALL_S)
        if done.returncode:
            raise SystemExit(done.stderr)
    return python


@contextmanager
def proxy_up(*flags: str) -> Iterator[Proxy]:
    """Run `balanceroute up` on free ports."""
    command = [sys.executable, "-m", "balanceroute.proxy", "up", TOPOLOGY, "--port=0"]
    command += ["--admin-port=0", "--log=none", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    try:
        readable = select.select([process.stdout], [], [], _READY_S)[0]
        ready = _READY.fullmatch(process.stdout.readline().decode()) if readable else None
        if ready is None:
            raise SystemExit("the proxy did not start")
        yield Proxy(*ready.groups())
    finally:
        process.terminate()
        process.wait(_READY_S)
        process.stdout.close()


# The openai package.


def check_openai(python: Path, proxy: Proxy, strict: Proxy) -> Iterator[Result]:
    """Run the checks that need the package."""
    script = ROOT / "scripts" / "openai_checks.py"
    done = run(python, script, proxy.url, proxy.admin_url, strict.url, KEY)
    version, *lines = done.stdout.splitlines() or ["?"]
    for line in lines:
        name, fault = json.loads(line)
        yield Result(f"openai {version}", name, fault)
    silent = done.stderr[-500:] or None
    yield Result(f"openai {version}", "warns of nothing", silent)


# curl.


class Curl:
    """The checks with curl. The name of a method is what it claims.

    Args:
        proxy: The proxy.
        folder: For bodies.
    """

    def __init__(self, proxy: Proxy, folder: Path) -> None:
        self._proxy = proxy
        self._folder = folder
        self._chat = f"{proxy.url}/v1/chat/completions"

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
        page = run("curl", "-sS", f"{self._proxy.admin_url}/admin/state").stdout
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
        done = run("curl", "-sS", "-I", f"{self._proxy.url}/health")
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


def check_curl(proxy: Proxy, folder: Path) -> Iterator[Result]:
    """Run every check of `Curl`."""
    version = run("curl", "--version").stdout.partition(" (")[0]
    checks = Curl(proxy, folder)
    for name in vars(Curl):
        if not name.startswith("_"):
            yield Result(version, name.replace("_", " "), _fault(getattr(checks, name)))


def _fault(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# The load tool.


def check_aiperf(python: Path, proxy: Proxy, folder: Path) -> Iterator[Result]:
    """Run NVIDIA's aiperf, unchanged (https://github.com/ai-dynamo/aiperf)."""
    lookup = "import importlib.metadata; print('aiperf', importlib.metadata.version('aiperf'))"
    version = run(python, "-c", lookup).stdout.strip()
    made = run(python, "-c", _TOKENISER, folder / "tokeniser")
    if made.returncode:
        yield Result(version, "a tokeniser", made.stderr[-500:])
        return
    for kind in ("chat", "completions"):
        for streaming in (True, False):
            name = f"{kind}, {'streamed' if streaming else 'whole'}"
            out = folder / name.replace(", ", "-")
            command = [python.parent / "aiperf", "profile", "--model", "emulated"]
            command += ["--url", proxy.url, "--endpoint-type", kind]
            command += ["--streaming"] if streaming else []
            command += ["--tokenizer", folder / "tokeniser", "--use-server-token-count"]
            command += ["--request-count", _LOAD_REQUESTS, "--concurrency", 16]
            # It takes an answer that ends with its first token, without a word, for none.
            command += ["--isl", 100, "--osl", 20, "--extra-inputs", "ignore_eos:true"]
            command += ["--ui-type", "none", "--artifact-dir", out]
            done = run(*command, limit_s=2 * _CLIENT_S)
            yield Result(version, name, _wrong_with_aiperf(done, out))


def _wrong_with_aiperf(done: subprocess.CompletedProcess[str], out: Path) -> str | None:
    page = out / "profile_export_aiperf.json"
    if done.returncode or not page.exists():
        return f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    report = json.loads(page.read_text())
    served = report["request_count"]["avg"]
    if served != _LOAD_REQUESTS or report["error_summary"]:
        return f"{served:g} of {_LOAD_REQUESTS} served: {report['error_summary']}"
    return None


def check_nothing_is_held(proxy: Proxy) -> Result:
    """Look whether the clients left anything behind."""
    page = run("curl", "-sS", f"{proxy.admin_url}/admin/state").stdout
    held = held_by_proxy(json.loads(page)["state"])
    return Result("all", "nothing is left behind", str(held) if held else None)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--without-load-tool", action="store_true", help="leave out aiperf, which is large"
    )
    arguments = parser.parse_args()
    # So that the proxies end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    python = make_venv(PACKAGES[:1] if arguments.without_load_tool else PACKAGES)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{KEY}\n")
        # Eight slots, one request on the way to them, and one that waits for that.
        strict_flags = ["--batch=1", "--pool-limit=1", "--queue-limit=1", f"--api-key-file={keys}"]
        with proxy_up() as proxy, proxy_up(*strict_flags) as strict:
            results += check_openai(python, proxy, strict)
            results += check_curl(proxy, folder)
            if not arguments.without_load_tool:
                results += check_aiperf(python, proxy, folder)
            results.append(check_nothing_is_held(proxy))
    for result in results:
        fault = "ok" if result.fault is None else f"FAILED: {result.fault[:300]}"
        print(f"{result.client:<14} {result.check:<40} {fault}")
    failed = sum(result.fault is not None for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
