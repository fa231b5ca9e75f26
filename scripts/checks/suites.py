"""Other projects' suites and load tools, each run against an engine alone and against the proxy before engines."""

import argparse
import hashlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import httpx
from tests.support.soak.run import held_by_proxy

from checks.clients import check_aiperf, check_frameworks, check_guidellm
from checks.fleet import (
    CLIENT,
    MODELS,
    VARIABLES,
    VENV,
    VLLM,
    Engine,
    Order,
    Proxy,
    ask,
    before,
    environment,
    essence,
    nixl_order,
    prepare,
    running,
    until,
)
from experiment import ROOT, right, table_head, table_row

HERE = Path(__file__).parent
HOME = ROOT / "build" / "suites"
PAGE = ROOT / "docs" / "appendix" / "suites.md"
MODEL = "tiny"
TOKENISER = MODELS / "tiny-dense"
SMG = "https://github.com/lightseekorg/smg"
SMG_COMMIT = "73da68ca9472bbc0ff5f63d31a8a21fbb8696359"
# Beside the CPU build, which asks for a torchvision of its own that the index lacks; this one is of torch 2.13.
_TORCHVISION, _SEES = HOME / "torchvision", ("torchvision==0.28.0",)
_PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout", "iniconfig", "pluggy", "tblib")
# The names by which the suites call the one model, of Hugging Face's hub and elsewhere.
NAMES = [
    "BAAI/bge-base-en-v1.5", "HuggingFaceH4/zephyr-7b-beta", "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "charent/self_cognition_Alice",
    "claude-3-7-sonnet-latest", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "facebook/opt-125m",
    "google/translategemma-4b-it", "intfloat/multilingual-e5-small",
    "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "openai/gpt-oss-20b",
    "qwen3-lora", "sentence-transformers/all-MiniLM-L12-v2", "typeof/zephyr-7b-beta-lora",
    "zephyr-lora",
]  # fmt: skip
_VLLM_TESTS = [
    "anthropic/test_messages.py", "generate",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_extra_content_fields.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py", "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_completion_with_prompt_embeds.py",
    "openai/completion/test_prompt_validation.py", "openai/completion/test_token_in_token_out.py",
    "openai/models", "openai/responses/test_basic.py", "openai/responses/test_errors.py",
    "openai/responses/test_function_call.py", "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py", "openai/responses/test_streaming_events.py",
    "openai/responses/test_structured_output.py", "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py", "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py", "serve/tokenize/test_tokenization.py",
]  # fmt: skip
_NIXL = "tests/v1/kv_connector/nixl_integration"
_SMG_TESTS = [
    "chat_completions",
    "completions",
    "messages",
    "responses",
    "router/test_pd_responses.py",
]
_FLAGS = (
    "--max-model-len=4096",
    "--enable-prompt-tokens-details",
    "--enable-tokenizer-info-endpoint",
    "--enable-prompt-embeds",
    "--max-logprobs=-1",
    "--structured-outputs-config.backend=xgrammar",
    # A model of random weights seldom ends by itself.
    '--override-generation-config={"max_new_tokens":96}',
)
_SUITE_S = 2400.0
_MOST = 60
_NOT_DRAWN = ("not drawn", "")
_RUNS = "it runs"
_TEST_S = 20
_AGAIN = 2
REQUESTS = 60
AT_ONCE = 8
_NOT_KEPT = (
    "the proxy answers 400, as these tests want, and the engine 404: neither keeps responses"
)
# (test, why the proxy does otherwise).
EXPLAINED = (
    ("test_invocations", "the proxy refuses SageMaker's route: 404 says which API to call"),
    (
        "kv_transfer_prompt_token_ids",
        "`kv_transfer_params` of a client are never taken: they name KV blocks",
    ),
    ("test_background_error", "400 as the engine's, in other words: responses are not kept"),
    ("test_mutually_exclusive_parameters", _NOT_KEPT),
    ("test_previous_response_id_invalid", _NOT_KEPT),
    ("test_store_false_previous_response_id_rejected", _NOT_KEPT),
    (
        "test_structured_output_json_schema",
        "sampled at random: it passes if the JSON ends within the limit",
    ),
    ("test_show_version", "`/version` is the proxy's"),
    ("test_server_load", "`/load` is the proxy's, and needs no flag; the engine's was not given"),
)

Outcomes = dict[str, tuple[str, str]]
"""Of each test: `passed`, `failed`, `skipped` or `not drawn`, and why."""


@dataclass(frozen=True)
class Side:
    """What a suite is run against: an engine alone, or the proxy before engines."""

    name: str
    url: str
    # What the NIXL tests ask, too.
    prefill: str
    decode: str


Suite = Callable[[Side, Sequence[str], Path], Outcomes]
"""Runs third-party tests against a side: all, or those of the given ids; it has a folder for logs."""


# What the suites need.


def prepare_suites() -> None:
    """Fetch the tests, and what runs them, as far as they are not there."""
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / f"vllm-{VLLM}").exists():
        _fetch_vllm_tests()
    if not (HOME / "smg").exists():
        _exec("git", "clone", "-q", SMG, HOME / "smg")
    _exec("git", "-C", HOME / "smg", "checkout", "-q", SMG_COMMIT)
    for home, packages in ((HOME / "pytest", _PYTEST), (_TORCHVISION, _SEES)):
        if not home.exists():
            target = ("--no-deps", "--target", home, "--python", VENV / "bin" / "python")
            _exec(VENV / "bin" / "uv", "pip", "install", "-q", *target, *packages)
    # A cache of Hugging Face's hub in which each name is our model: the suites look up tokenisers there.
    for name in NAMES:
        home = HOME / "hub" / f"models--{name.replace('/', '--')}"
        for folder in ("refs", "snapshots"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "refs" / "main").write_text("0" * 40)
        link = home / "snapshots" / ("0" * 40)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(TOKENISER)


def _fetch_vllm_tests() -> None:
    """Take the tests out of vLLM's source distribution; pip would build it."""
    # Not by `CLIENT`: the way to the index may need the environment's proxy or certificates.
    kind, name = {"accept": "application/vnd.pypi.simple.v1+json"}, f"vllm-{VLLM}.tar.gz"
    with httpx.Client(timeout=600.0) as index:
        listed = index.get("https://pypi.org/simple/vllm/", headers=kind).raise_for_status()
        (source,) = (one for one in listed.json()["files"] if one["filename"] == name)
        print(f"fetching {source['url']}", flush=True)
        packed = index.get(source["url"]).raise_for_status().content
    if hashlib.sha256(packed).hexdigest() != source["hashes"]["sha256"]:
        raise SystemExit(f"{source['url']} is not what the index says")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        tests = [one for one in archive if one.name.startswith(f"vllm-{VLLM}/tests/")]
        archive.extractall(HOME, tests, filter="data")


def _exec(
    *words: object,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    limit_s: float = _SUITE_S,
    may_fail: bool = False,
) -> str:
    """Run a command and return what it prints.

    Raises:
        SystemExit: It failed, and may not.
    """
    command = [str(word) for word in words]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | VARIABLES | {"HF_HUB_CACHE": str(HOME / "hub")} | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode and not may_fail:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}")
    return done.stdout


# Suites that pytest runs.


@dataclass(frozen=True)
class Tests:
    """A suite that pytest runs, with `suites_plugin.py`."""

    name: str
    root: Path
    tests: Sequence[str]
    most: int = 0  # Tests that are drawn of them, the same ones each time; 0 for all.

    def run(self, side: Side, only: Sequence[str], folder: Path) -> Outcomes:
        """Run the tests, or those of some ids."""
        name, root = self.name, self.root
        outcomes = folder / f"{name}-{side.name}.json"
        outcomes.unlink(missing_ok=True)
        host, _, prefill = side.prefill.removeprefix("http://").partition(":")
        ports = {
            "PREFILL_PORT": prefill,
            "DECODE_PORT": side.decode.rpartition(":")[2],
            "PROXY_PORT": side.url.rpartition(":")[2],
        }
        variables = {
            "SUITE_NAME": name,
            "SUITE_URL": side.url,
            "SUITE_MODEL": "meta-llama/Llama-3.1-8B-Instruct",
            "SUITE_OUTCOMES": str(outcomes),
            "SUITE_MOST": "0" if only else str(self.most),
            "PYTHONPATH": os.pathsep.join(map(str, (HOME / "pytest", HERE, root))),
        }
        variables |= ports | {f"{role}_HOST": host for role in ("PREFILL", "DECODE", "PROXY")}
        words = [VENV / "bin" / "python", "-P", "-m", "pytest", "-p", "suites_plugin", "-q"]
        words += ["-c", os.devnull, f"--rootdir={root}", f"--timeout={_TEST_S}", "--tb=line"]
        words += ["-W", "ignore", "-p", "no:cacheprovider"]
        words += [] if name == "vllm" else ["--noconftest"]
        said = _exec(*words, *(only or self.tests), cwd=root, variables=variables, may_fail=True)
        (folder / f"{name}-{side.name}.txt").write_text(said)
        if not outcomes.exists():
            raise SystemExit(f"{name} against the {side.name} ran no test:\n{said[-2000:]}")
        found: dict[str, list[str]] = json.loads(outcomes.read_text())
        return {test: (how, why) for test, (how, why) in found.items()}


def _disaggregation(side: Side, _only: Sequence[str], folder: Path) -> Outcomes:
    """Run the script by which vLLM compares the answers of a proxy with those of an engine."""
    script = HOME / f"vllm-{VLLM}" / _NIXL / "test_disagg_accuracy.py"
    words = [VENV / "bin" / "python", "-P", script, "--model_name", MODEL]
    words += ["--file_name", folder / "disaggregation.json", "--service_url", side.url]
    mode = "disagg" if side.name == "proxy" else "baseline"
    said = _exec(*words, "--mode", mode, may_fail=True)
    return {"test_disagg_accuracy": _verdict(said[-300:] if "Error" in said else None)}


# Load tools.


def _verdict(fault: str | None) -> tuple[str, str]:
    return ("failed", fault) if fault else ("passed", "")


def _bench(side: Side, _only: Sequence[str], folder: Path) -> Outcomes:
    """Run `vllm bench serve`."""
    outcomes: Outcomes = {}
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        report = folder / f"{backend}-{side.name}.json"
        words = [VENV / "bin" / "vllm", "bench", "serve", "--backend", backend]
        words += ["--base-url", side.url, "--endpoint", path, "--model", MODEL]
        words += ["--tokenizer", TOKENISER, "--dataset-name", "random", "--ignore-eos"]
        words += ["--random-input-len", "100", "--random-output-len", "20"]
        words += ["--num-prompts", REQUESTS, "--max-concurrency", AT_ONCE]
        words += ["--save-result", "--result-dir", folder, "--result-filename", report.name]
        said = _exec(*words, may_fail=True)
        result = json.loads(report.read_text()) if report.exists() else {}
        seen = f"{result.get('completed')} requests, {result.get('total_output_tokens')} tokens"
        whole = f"{REQUESTS} requests, {20 * REQUESTS} tokens"
        fault = None if seen == whole else f"{seen}: {said[-300:]}"
        outcomes[f"vllm bench serve {path}"] = _verdict(fault)
    return outcomes


def _guidellm(side: Side, _only: Sequence[str], folder: Path) -> Outcomes:
    """Run guidellm as the check of clients does."""
    out = folder / f"guidellm-{side.name}"
    out.mkdir(exist_ok=True)
    found = check_guidellm(side.url, out, MODEL)
    return {f"guidellm {one.check}": _verdict(one.fault) for one in found}


_TASK = """\
task: suites_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
_TASKS = {
    "generate": """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]""",
    "choice": """output_type: multiple_choice
doc_to_choice: [" yes", " no"]
doc_to_target: 0
metric_list: [{metric: acc}]""",
}
_QUESTIONS = 12


def _lm_eval(side: Side, _only: Sequence[str], folder: Path) -> Outcomes:
    """Run lm-eval: answers, and the probabilities of given ones; each must be the engine's."""
    python = environment(HOME / "lm-eval", "lm-eval[api]", "transformers")
    tasks, out = folder / "tasks", folder / f"lm-eval-{side.name}"
    tasks.mkdir(exist_ok=True)
    data = tasks / "questions.jsonl"
    rows = [
        {"question": f"Is {i} more than {5 * i - 20}? " * (1 + i % 4), "answer": "yes"}
        for i in range(_QUESTIONS)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, more in _TASKS.items():
        (tasks / f"{name}.yaml").write_text(_TASK.format(name=name, data=data, more=more))
    model = (
        f"base_url={side.url}/v1/completions,model={MODEL},tokenizer={TOKENISER},num_concurrent=4"
    )
    words = [python.parent / "lm_eval", "run", "--model", "local-completions"]
    words += ["--model_args", model, "--tasks", ",".join(f"suites_{name}" for name in _TASKS)]
    words += ["--include_path", tasks, "--log_samples", "--output_path", out]
    said = _exec(*words, variables={"HF_HOME": str(HOME / "hf")}, may_fail=True)
    outcomes: Outcomes = {
        f"lm-eval {name} {i}": ("failed", said[-300:]) for name in _TASKS for i in range(_QUESTIONS)
    }
    for file in out.rglob("samples_*.jsonl"):
        name = next(name for name in _TASKS if f"suites_{name}" in file.name)
        for row in map(json.loads, file.read_text().splitlines()):
            # What was answered is part of the outcome: both sides must say the same.
            answers = re.sub(r"(\.\d{2})\d+", r"\1", json.dumps(row["resps"]))
            outcomes[f"lm-eval {name} {row['doc_id']}"] = (f"passed {answers}", "")
    return outcomes


def _aiperf(side: Side, _only: Sequence[str], folder: Path) -> Outcomes:
    """Run NVIDIA's aiperf as the check of clients does."""
    out = folder / f"aiperf-{side.name}"
    out.mkdir(exist_ok=True)
    return {one.check: _verdict(one.fault) for one in check_aiperf(side.url, out, MODEL)}


def _libraries(side: Side, _only: Sequence[str], _folder: Path) -> Outcomes:
    """Run our checks with the anthropic, litellm and langchain packages."""
    found = check_frameworks(side.url, MODEL, "tool", "structured")
    return {f"{one.client} {one.check}": _verdict(one.fault) for one in found}


# Images, which the suites take from the network.

_COLOURS = (0x000000, 0xFF0000, 0x00FF00, 0x2040FF)


def _image(colour: int) -> dict[str, object]:
    """Return a part of a message: a picture of one colour and of black."""
    side = 56
    line = colour.to_bytes(3, "big") * (side // 2) + bytes(3 * (side // 2))
    picture = b64encode(b"P6 %d %d 255\n" % (side, side) + line * side).decode()
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/x-portable-pixmap;base64,{picture}"},
    }


def _images(side: Side, _only: Sequence[str], _folder: Path) -> Outcomes:
    """Ask about images, one and two, streamed and whole; both sides must say the same."""
    outcomes: Outcomes = {}
    for stream in (False, True):
        for colours in (*((one,) for one in _COLOURS), _COLOURS[1:3], _COLOURS[2:4]):
            parts = [*map(_image, colours), {"type": "text", "text": "What is this? " * 8}]
            body: dict[str, object] = {"model": MODEL}
            body["messages"] = [{"role": "user", "content": parts}]
            body |= {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": stream}
            name = f"images {', '.join(f'{one:06x}' for one in colours)}{' streamed' if stream else ''}"
            try:
                seen = essence(ask(side.url, "/v1/chat/completions", body))
            except AssertionError as error:
                outcomes[name] = ("failed", str(error))
            else:
                outcomes[name] = (f"passed {seen}", "")
    return outcomes


_TESTS = HOME / f"vllm-{VLLM}"
_POOLING_TESTS = [
    "basic/test_truncation.py",
    "embed/test_cohere_online.py",
    "embed/test_online.py",
    "scoring/test_bi_encoder_online.py",
]


@dataclass(frozen=True)
class Kind:
    """Suites that go with one kind of engines."""

    model: str  # A folder in `MODELS`.
    flags: Sequence[str]  # Further ones of `vllm serve`.
    suites: Mapping[str, Suite]
    variables: Mapping[str, str] = field(default_factory=dict)  # The engines'.


def kinds(most: int) -> tuple[Kind, ...]:
    """Return the suites by their engines; of each that pytest runs `most` tests are drawn, 0 for all."""
    pooling = [f"tests/entrypoints/pooling/{one}" for one in _POOLING_TESTS]
    vllm = [f"tests/entrypoints/{one}" for one in _VLLM_TESTS]
    chats: dict[str, Suite] = {
        "vllm": Tests("vllm", _TESTS, vllm, most).run,
        "nixl": Tests("nixl", _TESTS, [f"{_NIXL}/test_edge_cases.py"]).run,
        "disagg": _disaggregation,
        "smg": Tests("smg", HOME / "smg" / "e2e_test", _SMG_TESTS, most).run,
        "bench": _bench,
        "guidellm": _guidellm,
        "lm-eval": _lm_eval,
        "aiperf": _aiperf,
        "libraries": _libraries,
    }
    return (
        Kind("tiny-dense", _FLAGS, chats),
        Kind(
            "tiny-vision",
            ('--limit-mm-per-prompt={"image":2}',),
            {"images": _images},
            {"PYTHONPATH": str(_TORCHVISION)},
        ),
        Kind(
            "tiny-dense",
            ("--runner=pooling", "--max-model-len=512"),
            {"pooling": Tests("vllm", _TESTS, pooling, most).run},
        ),
    )


WHAT = {
    "vllm": "vLLM's tests of its entrypoints",
    "nixl": "vLLM's edge cases of NIXL: answers as a prefiller's and a decoder's",
    "disagg": "vLLM's script that compares answers of a proxy with an engine's",
    "smg": f"[SMG's]({SMG}/tree/{SMG_COMMIT[:12]}/e2e_test) end-to-end tests of chats, completions, messages, responses",
    "bench": f"`vllm bench serve`, {REQUESTS} requests, {AT_ONCE} at once: all answered, with every token",
    "guidellm": "guidellm: chats, completions and responses, none failed, but for those that it cuts off at its end",
    "lm-eval": "lm-eval: each answer, and each probability of a given one, is the engine's",
    "aiperf": "NVIDIA's aiperf, streamed and whole",
    "libraries": "our checks with the anthropic, litellm and langchain packages",
    "images": "a model that sees: each answer is the engine's",
    "pooling": "vLLM's tests of embeddings and scores",
}


# Both sides, side by side.


def orders(kind: Kind) -> list[Order]:
    """Return how to start an engine that does all of a request, a prefiller and a decoder."""
    roles = {"alone": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
    flags = (*kind.flags, "--served-model-name", MODEL, *NAMES)
    return [
        nixl_order(name, kind.model, role, flags, variables=kind.variables)
        for name, role in roles.items()
    ]


@contextmanager
def sides(kind: Kind, folder: Path) -> Iterator[tuple[list[Side], Proxy, Engine]]:
    """Run an engine alone, and the proxy before a prefiller and a decoder."""
    flags = ["--connector=nixl", "--batch=16", "--lease-s=30"]
    with running(orders(kind), folder) as (alone, prefill, decode):
        urls = {"prefill": [prefill.url], "decode": [decode.url]}
        with before(urls, flags, folder / "proxy") as proxy:
            found = [("engine", alone.url), ("proxy", proxy.url)]
            both = [Side(name, url, prefill.url, decode.url) for name, url in found]
            yield both, proxy, prefill


def differing(engine: Outcomes, proxy: Outcomes) -> list[str]:
    """Return the tests whose outcomes differ, those that one side did not have included."""
    missing = ("not run", "")
    return sorted(
        test
        for test in engine.keys() | proxy.keys()
        if engine.get(test, missing)[0] != proxy.get(test, missing)[0]
    )


def _outcomes(suite: Suite, side: Side, only: Sequence[str], folder: Path) -> Outcomes:
    try:
        return suite(side, only, folder)
    except (SystemExit, subprocess.TimeoutExpired, httpx.HTTPError) as error:
        # The rest shall run.
        return {_RUNS: ("failed", f"{type(error).__name__}: {error}")}


def explanation(test: str) -> str | None:
    """Return why a test may differ, or None."""
    return next((why for part, why in EXPLAINED if part in test), None)


def compare(suite: Suite, both: Sequence[Side], folder: Path) -> tuple[Outcomes, Outcomes]:
    """Run a suite against both sides, and tests that differ some times more: many sample at random.

    What passes once on a side passes.
    """
    engine, proxy = (_outcomes(suite, side, (), folder) for side in both)
    for _ in range(_AGAIN):
        tests = [test for test in differing(engine, proxy) if explanation(test) is None]
        if not tests:
            break
        for side, known in zip(both, (engine, proxy), strict=True):
            for test, outcome in _outcomes(suite, side, tests, folder).items():
                if test in tests and known.get(test, ("failed", ""))[0] == "failed":
                    known[test] = outcome
    return engine, proxy


# A prefiller that is started again under load, which no third-party suite does.

_BODY = {"model": MODEL, "max_tokens": 24, "ignore_eos": True, "temperature": 0}


def _answer(url: str, prompt: str) -> str:
    """Return an answer's text, or how it was refused."""
    body = _BODY | {"prompt": prompt}
    answer = CLIENT.post(f"{url}/v1/completions", json=body, timeout=120.0)
    if answer.status_code != 200:
        return f"refused with {answer.status_code}"
    return str(answer.json()["choices"][0]["text"])


def restart(side: Side, proxy: Proxy, prefiller: Engine, engine: str) -> dict[str, bool]:
    """Start the only prefiller again while clients ask; return each claim, and whether it holds."""
    prompts = [f"Question {i}: what is {i} times {i}? " * 12 for i in range(40)]
    wanted = [_answer(engine, prompt) for prompt in prompts]
    seen: list[tuple[int, str]] = []
    stop = threading.Event()

    def ask_on(i: int) -> None:
        while not stop.is_set():
            i = (i + AT_ONCE) % len(prompts)
            seen.append((i, _answer(side.url, prompts[i])))
            # A client that is refused waits before it asks again.
            stop.wait(0.5 if seen[-1][1].startswith("refused") else 0.0)

    clients = [threading.Thread(target=ask_on, args=(i,), daemon=True) for i in range(AT_ONCE)]
    for one in clients:
        one.start()
    time.sleep(5.0)
    prefiller.kill()
    prefiller.restart()
    back_s = until(lambda: _answer(side.url, prompts[0]) == wanted[0], "an answer again")
    count = len(seen)
    time.sleep(5.0)
    stop.set()
    for one in clients:
        one.join(120.0)
    exact = sum(text == wanted[i] for i, text in seen)
    refused = sum(text == "refused with 503" for _, text in seen)
    # Requests from before its return may fail afterwards.
    late = sum(text != wanted[i] for i, text in seen[count:])
    return {
        f"{len(seen)} requests: {exact} answers are the engine's, {refused} times 503": (
            len(seen) == exact + refused
        ),
        f"served {back_s:.1f} s after it is back, and then {late} of {len(seen) - count} times 503": (
            late <= AT_ONCE < len(seen) - count
        ),
        "nothing is held": not held_by_proxy(proxy.state()),
    }


# The page.


@dataclass(frozen=True)
class Row:
    """What a suite showed: of the tests that were drawn, how many pass on an engine alone, and through the proxy."""

    tests: int = 0
    of: int = 0  # Of so many.
    engine: int = 0
    proxy: int = 0
    differ: Mapping[str, str] = field(default_factory=dict)  # And what these say through the proxy.
    fault: str = ""  # Why it did not run.

    @property
    def unexplained(self) -> list[str]:
        """The tests that differ, and nothing explains why."""
        return [test for test in self.differ if explanation(test) is None]


def row_of(engine: Outcomes, proxy: Outcomes) -> Row:
    """Return what the outcomes of both sides show."""
    tests = engine.keys() | proxy.keys()
    drawn = [test for test in tests if engine.get(test) != _NOT_DRAWN]
    first, second = (
        sum(how.startswith("passed") for how, _ in one.values()) for one in (engine, proxy)
    )
    said = {
        test.rpartition("/")[2]: proxy.get(test, ("not run", "not run"))[1][:200]
        for test in differing(engine, proxy)
    }
    broken = {**proxy, **engine}.get(_RUNS, ("", ""))[1]
    return Row(len(drawn), len(tests), first, second, said, broken)


def page_of(rows: Mapping[str, Row], restarted: Mapping[str, bool], minutes: float) -> str:
    """Return the page of the appendix."""
    head = table_head("suite", *right(["tests", "engine alone", "proxy", "differ"]), "what it is")
    table = [head]
    reasons: dict[str, dict[str, None]] = {}
    for name in filter(rows.__contains__, WHAT):
        row = rows[name]
        tests = f"{row.tests} of {row.of}" if row.tests < row.of else row.tests
        counts = [tests, row.engine, row.proxy, len(row.differ)]
        counts = ["did not run", "-", "-", "-"] if row.fault else counts
        table.append(table_row(name, *counts, WHAT[name]))
        if row.fault:
            lines = row.fault.splitlines()
            errors = [line.strip() for line in lines if "Error" in line] or lines
            reasons[errors[-1][:300]] = {name: None}
            continue
        for test, said in row.differ.items():
            reason = explanation(test) or f"NOT EXPLAINED: {said}"
            short = f"`{test.rpartition('::')[2].partition('[')[0]}`"
            reasons.setdefault(reason, {})[short] = None
    listed = "\n".join(f"* {', '.join(tests)}: {why}" for why, tests in reasons.items())
    claims = "\n".join(
        f"* {'yes' if holds else 'WRONG'}: {one}" for one, holds in restarted.items()
    )
    return f"""# Tables: suites of others

<!-- not run: downloads 12 GB, and runs for half an hour -->

    python scripts/checks suites

runs tests of other projects against a vLLM {VLLM} engine alone, and against the proxy before a prefiller and a
decoder (NIXL), and counts what passes. The model is tiny, of random weights; all engines have one set of flags, and
an answer ends after 96 tokens. So what asks for a true sentence, another vocabulary, a longer context or other flags
fails on both sides. Tests that differ are run twice more, as many sample at random. Tests without a server are left
out, and of many tests {_MOST} are drawn, the same ones each time (`--most 0` for all). This run took {minutes:.0f} minutes.

{chr(10).join(table)}

## Differences

{listed or "None."}

## A prefiller that is started again

The only prefiller is killed and started again while {AT_ONCE} clients ask:

{claims or "Not run."}
"""


def _run(
    kind: Kind, only: Sequence[str], folder: Path, restarted: dict[str, bool] | None
) -> Iterator[tuple[str, Row]]:
    """Run the chosen suites of a kind; `restarted` gets what the restart shows, which ends the prefiller."""
    chosen = [name for name in kind.suites if name in only]
    with_restart = restarted is not None and "restart" in only
    if not chosen and not with_restart:
        return
    folder.mkdir(parents=True)
    try:
        with sides(kind, folder) as (both, proxy, prefiller):
            while chosen:
                yield chosen[0], row_of(*compare(kind.suites[chosen[0]], both, folder))
                del chosen[0]
            if restarted is not None and with_restart:
                restarted |= restart(both[1], proxy, prefiller, both[0].url)
    except SystemExit as error:  # Of engines; those of the next kind may start.
        yield from ((name, Row(fault=str(error))) for name in chosen)


def suites(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Suites and load tools of others, against an engine alone and the proxy before engines, side by side.

    Installs vLLM's CPU build on the first run (6 GB), and what the suites need (6 GB) into build/. Prints a page with
    the counts. Exits 1 if a test differs and nothing explains why, or a suite does not run.
    """
    names = [*WHAT, "restart"]
    parser.add_argument("--only", default=",".join(names), metavar="NAME,..", help=", ".join(names))
    parser.add_argument(
        "--most", type=int, default=_MOST, help="tests of a suite (default: %(default)s)"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="for logs and outcomes")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(words)
    only = arguments.only.split(",")
    if not set(only) <= set(names):
        parser.error(f"--only: of {', '.join(names)}")
    prepare()
    prepare_suites()
    begin_s = time.monotonic()
    rows: dict[str, Row] = {}
    restarted: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="balanceroute-suites-") as scratch:
        for i, kind in enumerate(kinds(arguments.most)):
            folder = Path(arguments.keep or scratch) / f"engines-{i}"
            for name, row in _run(kind, only, folder, None if i else restarted):
                rows[name] = row
                took_s = time.monotonic() - begin_s
                print(f"{took_s:5.0f} s {name}: {row}", flush=True)
                if arguments.write:  # Each time: the run may be ended from outside.
                    PAGE.write_text(page_of(rows, restarted, took_s / 60))
    page = page_of(rows, restarted, (time.monotonic() - begin_s) / 60)
    print(page)
    if arguments.write:
        PAGE.write_text(page)
    wrong = any(row.unexplained or row.fault for row in rows.values())
    return int(wrong or not all(restarted.values()))
