"""Clients as people use them: their environments, and what must hold of each."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.soak.run import held_by_proxy

from balanceroute.proxy.cli.up import emulate_command
from balanceroute.topologies.topology import read_topology
from checks.agents import check_agents
from checks.fleet import Proxy, before, environment
from checks.packages import FOUND_FAULTS, Result, outcomes
from experiment import emulated

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# For the scripts beside this one.
_ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
CHECK_S = 600.0
_TOO_LONG = 124


# Client libraries that go together, by the environment that they are in.
KITS = {
    "openai": ("openai",),
    "aiperf": ("aiperf",),
    "guidellm": ("guidellm",),
    "schemathesis": ("schemathesis",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # The latter for tools.
    "langchain": ("langchain-openai", "langchain-anthropic"),
}
FRAMEWORKS = ("anthropic", "litellm", "langchain")


def python_of(kit: str) -> Path:
    """Return the Python that has one of `KITS`."""
    return environment(ROOT / "build" / "clients" / kit, *KITS[kit])


def run(*command: object, limit_s: float = CHECK_S) -> subprocess.CompletedProcess[str]:
    """Run a command; its exit status is in the result, 124 if it was ended as it took too long."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, check=False, env=_ENVIRONMENT
        )
    except subprocess.TimeoutExpired as error:
        # Bytes even if text was asked for.
        said: Any = error.stdout or b""
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        reason = f"not within {limit_s:g} s"
        return subprocess.CompletedProcess(words, _TOO_LONG, text, reason)


def check_script(kit: str, script: str, *arguments: str) -> Iterator[Result]:
    """Run one of the scripts beside this one with a kit; see `packages.py` for what it prints."""
    done = run(python_of(kit), "-P", HERE / script, *arguments)
    version, *lines = done.stdout.splitlines() or ["?"]
    for line in lines:
        check, fault = json.loads(line)
        yield Result(f"{kit} {version}", check, fault)
    # Any other status is that of a script that broke.
    if not lines or done.returncode not in (0, FOUND_FAULTS):
        yield Result(f"{kit} {version}", "runs", f"{done.returncode}: {done.stderr[-500:]}")


def check_frameworks(url: str, model: str, *left_out: str) -> Iterator[Result]:
    """Run the packages that applications are built on, without checks whose names begin so."""
    for kit in FRAMEWORKS:
        yield from check_script(kit, "packages.py", kit, url, model, *left_out)


def check_schema(url: str, model: str, engine_url: str, examples: int) -> Iterator[Result]:
    """Compare the proxy with one of its engines, on requests that vLLM's schema describes."""
    words = (url, model, engine_url, str(examples))
    yield from check_script("schemathesis", "schema.py", *words)


def report(results: Sequence[Result]) -> int:
    """Print a table; return the number of failures."""
    for result in results:
        fault = "ok" if result.fault is None else f"FAILED: {result.fault[:600]}"
        print(f"{result.client:<22} {result.check:<50} {fault}")
    failed = sum(result.fault is not None for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return failed


# What curl gets from the proxy before emulated engines.

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


# What load tools measure through the proxy: NVIDIA's aiperf (https://github.com/ai-dynamo/aiperf), and
# guidellm of vLLM's project (https://github.com/vllm-project/guidellm).

_LOAD_REQUESTS, _STREAMS = 60, 8
_LIMIT_S = 240.0
# A tokeniser of bytes, so that load tools ask nobody for one.
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


def check_aiperf(url: str, folder: Path, model: str) -> Iterator[Result]:
    """Run it, unchanged."""
    python, version, fault = _load_tool("aiperf", folder)
    if fault is not None:
        yield Result(version, "a tokeniser", fault)
        return
    for kind in ("chat", "completions"):
        for streaming in (True, False):
            name = f"{kind}, {'streamed' if streaming else 'whole'}"
            out = folder / name.replace(", ", "-")
            command = [python.parent / "aiperf", "profile", "--model", model]
            command += ["--url", url, "--endpoint-type", kind]
            command += ["--streaming"] if streaming else []
            command += ["--tokenizer", folder / "tokeniser", "--use-server-token-count"]
            command += ["--request-count", _LOAD_REQUESTS, "--concurrency", 16]
            # It takes an answer that ends with its first token, without a word, for none.
            command += ["--isl", 100, "--osl", 20, "--extra-inputs", "ignore_eos:true"]
            command += ["--ui-type", "none", "--artifact-dir", out]
            done = run(*command, limit_s=_LIMIT_S)
            yield Result(version, name, _wrong_with_aiperf(done, out))


def _load_tool(kit: str, folder: Path) -> tuple[Path, str, str | None]:
    """Return the Python of a load tool, its name and version, and what is wrong with the tokeniser for it."""
    python = python_of(kit)
    lookup = f"import importlib.metadata; print('{kit}', importlib.metadata.version('{kit}'))"
    version = run(python, "-c", lookup).stdout.strip()
    made = run(python, "-c", _TOKENISER, folder / "tokeniser")
    return python, version, made.stderr[-500:] if made.returncode else None


def check_guidellm(
    url: str, folder: Path, model: str, *, may_cut: int = _STREAMS
) -> Iterator[Result]:
    """Run it, unchanged. It may cut off what still runs as the last of those that it counts ends: `may_cut` at most."""
    python, version, fault = _load_tool("guidellm", folder)
    if fault is not None:
        yield Result(version, "a tokeniser", fault)
        return
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        out = folder / f"guidellm{path.replace('/', '-')}.json"
        command = [python.parent / "guidellm", "run", "--disable-console", "--output"]
        command += [f"kind=json,path={out}", "--backend"]
        command += [f"kind=openai_http,target={url},model={model},request_format={path}"]
        command += ["--profile", f"kind=concurrent,streams={_STREAMS}"]
        command += ["--constraint", f"kind=max_requests,count={_LOAD_REQUESTS}"]
        command += ["--tokenizer", f"kind=hf_auto,model={folder / 'tokeniser'}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=20"]
        done = run(*command, limit_s=_LIMIT_S)
        yield Result(version, f"{path}, streamed", _wrong_with_guidellm(done, out, may_cut))


def _wrong_with_guidellm(
    done: subprocess.CompletedProcess[str], out: Path, may_cut: int
) -> str | None:
    if done.returncode or not out.exists():
        return f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] < _LOAD_REQUESTS - may_cut:
        return f"{totals['successful']} of {_LOAD_REQUESTS} served, {totals['errored']} failed"
    return None


def _wrong_with_aiperf(done: subprocess.CompletedProcess[str], out: Path) -> str | None:
    page = out / "profile_export_aiperf.json"
    if done.returncode or not page.exists():
        return f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    report = json.loads(page.read_text())
    served = report["request_count"]["avg"]
    if served != _LOAD_REQUESTS or report["error_summary"]:
        return f"{served:g} of {_LOAD_REQUESTS} served: {report['error_summary']}"
    return None


ENGINES = read_topology("emulated-2p8d")
MODEL = "emulated"
KEY = "sk-for-the-check"
GROUPS = ("openai", "frameworks", "agents", "curl", "schema", "aiperf", "guidellm")
_SCHEMA_EXAMPLES = 40


def check_openai(proxy: Proxy, strict: Proxy) -> Iterator[Result]:
    """Run the openai package against both."""
    words = (proxy.url, proxy.admin_url, strict.url, KEY)
    yield from check_script("openai", "packages.py", "openai", *words)


def check_against_an_engine(proxy: Proxy) -> Iterator[Result]:
    """Compare the proxy with its first prefiller."""
    yield from check_schema(proxy.url, MODEL, _prefiller(proxy), _SCHEMA_EXAMPLES)


def check_wires(proxy: Proxy) -> Iterator[Result]:
    """Send what agents send to the proxy and to its first prefiller."""
    yield from check_agents(proxy.url, _prefiller(proxy), MODEL)


def _prefiller(proxy: Proxy) -> str:
    """Return the URL of the first one."""
    return next(str(one["url"]) for one in proxy.instances() if one["role"] == "prefill")


def check_nothing_is_held(proxy: Proxy) -> Result:
    """Look whether the clients left anything behind."""
    held = held_by_proxy(proxy.state())
    return Result("all", "nothing is left behind", str(held) if held else None)


def clients(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Clients as people use them, against a proxy that runs before emulated engines.

    The openai, anthropic, litellm and langchain packages, the requests of Claude Code and Codex, curl, the load tools
    aiperf and guidellm, and requests drawn from vLLM's own openapi.json. Makes virtual environments in build/clients on
    its first run (1.8 GB, and 6 GB for guidellm, which brings torch), starts two proxies, each before engines of its own, and prints a table of what works. Exits 1 if
    anything does not.
    """
    parser.add_argument(
        "--only", default=",".join(GROUPS), metavar="NAME,..", help=f"of {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--flags",
        default="",
        metavar="WORDS",
        help="further flags of the proxies: --flags='--resume=exact --first-token=prefill'",
    )
    arguments = parser.parse_args(words)
    flags = shlex.split(arguments.flags)
    only = set(arguments.only.split(","))
    if not only <= set(GROUPS):
        parser.error(f"--only: of {', '.join(GROUPS)}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{KEY}\n")
        # Eight slots, one request on the way to them, and one that waits for that.
        strict_flags = ["--batch=1", "--pool-limit=1", "--queue-limit=1", f"--api-key-file={keys}"]
        engines = emulate_command(ENGINES)
        with (
            emulated(engines[engines.index("emulate") + 1 :]) as urls,
            emulated(engines[engines.index("emulate") + 1 :]) as others,
            before(urls, flags, folder / "proxy") as proxy,
            before(others, [*strict_flags, *flags], folder / "strict") as strict,
        ):
            groups: dict[str, Iterable[Result]] = {
                "openai": check_openai(proxy, strict),
                "frameworks": check_frameworks(proxy.url, MODEL),
                "agents": check_wires(proxy),
                "curl": check_curl(proxy.url, proxy.admin_url, folder),
                "schema": check_against_an_engine(proxy),
                "aiperf": check_aiperf(proxy.url, folder, MODEL),
                "guidellm": check_guidellm(proxy.url, folder, MODEL),
            }
            for name, group in groups.items():
                if name in only:
                    results += group
            results.append(check_nothing_is_held(proxy))
    return 1 if report(results) else 0


def ray(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Ray Serve with our request router, against its own, before emulated ranks.

    Makes a virtual environment in build/ray on its first run, and starts a Ray of its own. Ray listens at all
    addresses, so it gets a network namespace with loopback alone; without `unshare` it asks for a random token. Each
    choice must be the one that a scheduler makes that is told the same, no replica may have more than its slots,
    and ranks must idle less than with Ray's power-of-two router on the same load. Takes a minute.
    """
    parser.parse_args(words)
    python = environment(ROOT / "build" / "ray", "-e", f"{ROOT}[ray]", "pytest")
    # The project's conftest asks for what its other tests need.
    options = [
        "--noconftest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        "-rs",
        "-o",
        "faulthandler_timeout=0",
    ]
    test = ROOT / "tests" / "live" / "test_ray_router.py"
    command = [str(one) for one in (python, "-m", "pytest", *options, test)]
    apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") and not run(*apart, "true").returncode:
        command = [*apart, *command]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
