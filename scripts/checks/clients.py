"""Clients as people use them: their environments, and what must hold of each."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.soak.run import held_by_proxy

from balanceroute.proxy.cli.up import emulate_command
from balanceroute.topologies.topology import read_topology
from checks.agents import check_agents
from checks.fleet import ROOT, before, environment, until
from checks.packages import FOUND_FAULTS, Result
from experiment import emulated

HERE = Path(__file__).parent
# For the scripts beside this one.
_ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
CHECK_S = 600.0
MODEL = "emulated"
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
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
        start_new_session=True,
    ) as process:
        try:
            output, said = process.communicate(timeout=limit_s)
            status = process.returncode
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # Load tools have workers, which outlive them.
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, _ = process.communicate()
            status, said = _TOO_LONG, f"not within {limit_s:g} s"
    return subprocess.CompletedProcess(words, status, output, said)


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

_FOR_EVER = {"stream": True, "max_tokens": 100_000, "ignore_eos": True}
# By what is shown: flags, members of the body, and how all that curl writes looks.
_CURL: dict[str, tuple[Sequence[str], dict[str, Any], str]] = {
    "answer": (["-i"], {}, '^HTTP/1.1 200.*"content": ?".+"'),
    "stream": (["-N"], {"stream": True}, r"^(data: [^\n]+\n\n){4,}(?<=data: \[DONE\]\n\n)$"),
    "HTTP/1.0": (["--http1.0", "-i"], {}, "(?i)^HTTP/1.1 200.*content-length"),
    "HTTP/1.0, stream": (
        ["--http1.0", "-i", "-N"],
        {"stream": True},
        r"(?i)^(?!.*transfer-encoding).*data: \[DONE\]\n\n$",
    ),
    "expect 100-continue with 2 MB": (
        ["-v", "-H", "Expect: 100-continue"],
        {"messages": [{"role": "user", "content": "x" * (2 << 20)}]},
        '(?=.*HTTP/1.1 100 Continue)(?=.*HTTP/1.1 200).*"finish_reason"',
    ),
    "chunked upload": (["-H", "Transfer-Encoding: chunked"], {}, '"completion_tokens": ?[1-9]'),
    "keep-alive": (
        [*["-o", "/dev/null"] * 3, "-w", r"%{http_code} %{num_connects}\n", "URL", "URL"],
        {},
        r"^200 1\n200 0\n200 0\n$",
    ),
    "error": (["-i"], {"max_tokens": -1}, '^HTTP/1.1 400.*"message"'),
    "interrupted stream": (["-N", "-m", "1"], _FOR_EVER, "(data: .*){6}timed out"),
}


def check_curl(url: str, folder: Path) -> Iterator[Result]:
    """Run curl in each of these ways."""
    version = run("curl", "--version").stdout.partition(" (")[0]
    target, file = f"{url}/v1/chat/completions", folder / "body.json"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    for name, (flags, members, wanted) in _CURL.items():
        file.write_text(json.dumps(body | members))
        words = ["-sS", "-H", "Content-Type: application/json", "--data-binary", f"@{file}"]
        done = run("curl", *words, *(target if one == "URL" else one for one in flags), target)
        said = done.stdout + done.stderr
        yield Result(version, name, None if re.search(wanted, said, re.DOTALL) else said[-300:])


# What load tools measure through the proxy: NVIDIA's aiperf (https://github.com/ai-dynamo/aiperf), and
# guidellm of vLLM's project (https://github.com/vllm-project/guidellm).

_LOAD_REQUESTS, _STREAMS = 60, 8
_LIMIT_S = 240.0
# A tokeniser of bytes, so that load tools do not download one.
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
    tokeniser = _tokeniser("aiperf", folder)
    for kind in ("chat", "completions"):
        for how in ("streamed", "whole"):
            out = folder / f"{kind}-{how}"
            words = ["profile", "--model", model, "--url", url, "--endpoint-type", kind]
            words += ["--streaming"] if how == "streamed" else []
            words += ["--tokenizer", tokeniser, "--use-server-token-count"]
            words += [f"--request-count={_LOAD_REQUESTS}", "--concurrency=16"]
            # It takes an answer that ends with its first token, without a word, for none.
            words += ["--isl=100", "--osl=20", "--extra-inputs", "ignore_eos:true"]
            words += ["--ui-type", "none", "--artifact-dir", str(out)]

            def wrong(report: Any) -> bool:
                served = report["request_count"]["avg"]
                return bool(served != _LOAD_REQUESTS or report["error_summary"])

            found = _measured("aiperf", words, out / "profile_export_aiperf.json", wrong)
            yield Result(found[0], f"{kind}, {how}", found[1])


def check_guidellm(
    url: str, folder: Path, model: str, *, may_cut: int = _STREAMS
) -> Iterator[Result]:
    """Run it, unchanged. It may cut off what still runs as the last of those that it counts ends: `may_cut` at most."""
    tokeniser = _tokeniser("guidellm", folder)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        page = folder / f"guidellm{path.replace('/', '-')}.json"
        words = ["run", "--disable-console", "--output", f"kind=json,path={page}", "--backend"]
        words += [f"kind=openai_http,target={url},model={model},request_format={path}"]
        words += ["--profile", f"kind=concurrent,streams={_STREAMS}"]
        words += ["--constraint", f"kind=max_requests,count={_LOAD_REQUESTS}"]
        words += ["--tokenizer", f"kind=hf_auto,model={tokeniser}"]
        words += ["--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=20"]

        def wrong(report: Any) -> bool:
            totals = report["benchmarks"][0]["metrics"]["request_totals"]
            return bool(totals["errored"] or totals["successful"] < _LOAD_REQUESTS - may_cut)

        version, fault = _measured("guidellm", words, page, wrong)
        yield Result(version, f"{path}, streamed", fault)


def _tokeniser(kit: str, folder: Path) -> str:
    made = run(python_of(kit), "-c", _TOKENISER, folder / "tokeniser")
    assert not made.returncode, made.stderr[-500:]
    return str(folder / "tokeniser")


def _measured(
    kit: str, words: Sequence[str], page: Path, wrong: Callable[[Any], bool]
) -> tuple[str, str | None]:
    """Run a load tool, and judge its report; return its version, and what is wrong."""
    lookup = f"import importlib.metadata; print('{kit}', importlib.metadata.version('{kit}'))"
    version = run(python_of(kit), "-c", lookup).stdout.strip()
    done = run(python_of(kit).parent / kit, *words, limit_s=_LIMIT_S)
    if done.returncode or not page.exists():
        return version, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    report = page.read_text()
    return version, report[:500] if wrong(json.loads(report)) else None


ENGINES = read_topology("emulated-2p8d")
KEY = "sk-for-the-check"
GROUPS = ("openai", "frameworks", "agents", "curl", "schema", "aiperf", "guidellm")
_SCHEMA_EXAMPLES = 40


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
            emulated(engines[engines.index("emulate") + 1 :]) as strict_urls,
            before(urls, flags, folder / "proxy") as proxy,
            before(strict_urls, [*strict_flags, *flags], folder / "strict") as strict,
        ):
            openai = (proxy.url, MODEL, proxy.admin_url, strict.url, KEY)
            engine = urls["prefill"][0]
            groups: dict[str, Iterable[Result]] = {
                "openai": check_script("openai", "packages.py", "openai", *openai),
                "frameworks": check_frameworks(proxy.url, MODEL),
                "agents": check_agents(proxy.url, engine, MODEL),
                "curl": check_curl(proxy.url, folder),
                "schema": check_schema(proxy.url, MODEL, engine, _SCHEMA_EXAMPLES),
                "aiperf": check_aiperf(proxy.url, folder, MODEL),
                "guidellm": check_guidellm(proxy.url, folder, MODEL),
            }
            for name, group in groups.items():
                if name in only:
                    results += group
            fault = None
            try:
                until(lambda: not held_by_proxy(proxy.state()), "nothing is held", limit_s=2.0)
            except AssertionError:
                fault = str(held_by_proxy(proxy.state()))
            results.append(Result("all", "nothing is left behind", fault))
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
    options = "--noconftest -q -p no:cacheprovider --disable-warnings -rs -o faulthandler_timeout=0"
    test = ROOT / "tests" / "live" / "test_ray_router.py"
    command = [str(one) for one in (python, "-m", "pytest", *options.split(), test)]
    apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") and not run(*apart, "true").returncode:
        command = [*apart, *command]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
