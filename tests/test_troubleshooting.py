"""Each message that operators of real fleets have reported, and each warning of the proxy, leads to its row."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.script import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LINES = (ROOT / "docs" / "appendix" / "log.md").read_text(encoding="utf-8")


class Case(NamedTuple):
    """A line as it stands in an engine's log, and what the row has to name as the way out."""

    report: str
    line: str
    action: str


CASES = [
    Case(
        "aws-do-eks#84",
        "WARNING [base_worker.py:3032] Releasing expired KV blocks for request cmpl-7-0 which were "
        "retrieved by 0 remote worker(s) before lease expired.",
        "lease_s",
    ),
    Case(
        "vllm#37745",
        "request cmpl-3 has been in WAITING_FOR_REMOTE_KVS for 300 s",
        "first_token_timeout_s",
    ),
    Case(
        "vllm-ascend PR 6455",
        "zmq.error.ZMQError: Address already in use (addr='tcp://*:30100')",
        "topology check",
    ),
    Case(
        "vllm#26896",
        "WARNING Got invalid KVTransferParams: {'do_remote_prefill': True}. This request will not "
        "utilize KVTransfer",
        "topology",
    ),
    Case(
        "vllm#27083",
        "RuntimeError: Remote NIXL agent engine ID mismatch. Expected 0a1b,received 2c3d.",
        "topology commands",
    ),
    Case(
        "vllm PR 29503",
        "RuntimeError: NIXL compatibility hash mismatch. Local: 1f, Remote: 2e. Prefill and decode "
        "instances have incompatible configurations.",
        "topology check --online",
    ),
    Case(
        "vllm#42895",
        "AssertionError: KV cache sizes must match between P and D when replicated (region 0: "
        "local=16384, remote=8192, bsr=1).",
        "--block-size",
    ),
    Case(
        "vllm PR 49230",
        "AssertionError: Number of KV layers must match between prefill and decode",
        "speculative decoding",
    ),
    Case(
        "vllm#43547",
        "INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. "
        "This typically happens when some processes are hanging",
        "Restart the whole group",
    ),
    Case(
        "vllm-ascend#4866",
        "Failed to connect to target: 10.0.0.3:26001, status: 103900",
        "hccn_tool",
    ),
    Case(
        "vllm-ascend#7401",
        "Connect timeout to: 10.0.0.3:26001, you can increase the timeout duration to reduce the "
        "ASCEND_CONNECT_TIMEOUT environment variable.",
        "ASCEND_CONNECT_TIMEOUT = 10000",
    ),
    Case(
        "vllm-ascend#4725",
        "listen on ip[10.0.0.1] and specific port[16666] fail, please check",
        "HCCL_NPU_SOCKET_PORT_RANGE",
    ),
    Case(
        "smg#2382", "nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT", "operations.md#restart"
    ),
    Case(
        "vllm#49238",
        "#4 0x7f in nixlAgent::loadRemoteMD(std::string const&)",
        "drain before restarts",
    ),
    Case("vllm PR 55906", "UCX  cuda_ipc_md.c:88 invalid device context", "pid: host"),
    Case(
        "the limit of ten minutes",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by "
        "slow weight loading for large models.",
        "VLLM_ENGINE_READY_TIMEOUT_S",
    ),
    Case(
        "vllm-ascend#8427",
        "ERROR Mooncake transfer failed for request cmpl-9, ret: -1",
        "kv_load_failure_policy",
    ),
]


def rows() -> list[tuple[list[re.Pattern[str]], str]]:
    """Return the messages of each row, where `…` is anything, and the row."""
    _, _, table = PAGE.partition("## Messages of the engines")
    found = []
    for row in re.findall(r"^\|(.*)\|$", table, re.MULTILINE)[2:]:
        # Shorter ones are words that go with a message.
        messages = re.findall(r"`([^`]{10,})`", row.split(" | ")[0])
        found.append(
            ([re.compile(".*".join(map(re.escape, one.split("…")))) for one in messages], row)
        )
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.report)
def test_a_message_leads_to_its_row(case: Case) -> None:
    leading = [row for messages, row in rows() if any(one.search(case.line) for one in messages)]
    assert len(leading) == 1, leading
    assert case.action in leading[0]


def test_every_row_of_messages_has_one_to_search_for() -> None:
    assert len(rows()) > 20
    assert all(messages for messages, _ in rows())


# Lines of the proxy's own log.

LEVELS = {"warning", "error", "exception", "critical", "log"}
# Those whose words are made elsewhere, which `tests/live/settings` has.
ELSEWHERE = {("proxy/live/proxy.py", "message")}


def said(words: ast.expr, scope: ast.AST) -> Iterator[str]:
    """Yield what a message may be; what is filled in is `…`."""
    if isinstance(words, ast.Constant):
        yield re.sub("%[sr]", "…", str(words.value))
    elif isinstance(words, ast.IfExp):
        yield from said(words.body, scope)
        yield from said(words.orelse, scope)
    else:
        assert isinstance(words, ast.Name), ast.unparse(words)
        given = [
            one.value
            for one in ast.walk(scope)
            if isinstance(one, ast.Assign)
            and [ast.unparse(name) for name in one.targets] == [words.id]
        ]
        assert given, words.id
        for one in given:
            yield from said(one, scope)


def warnings() -> Iterator[tuple[str, str]]:
    """Yield each message of the proxy from warning on, and its file."""
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        if {"lab", "cli"} & set(path.parts):
            continue  # What they say is on a terminal.
        source, name = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
        scopes: dict[ast.AST, ast.AST] = {}
        for function in ast.walk(source):  # Those inside another come after it.
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                scopes.update(dict.fromkeys(ast.walk(function), function))
        for call, scope in scopes.items():
            match call:
                case ast.Call(ast.Attribute(ast.Name(id="_log" | "_LOG"), level)) if (
                    level in LEVELS
                ):
                    words = call.args[level == "log"]
                    shown = ast.unparse(words)
                    if (name, shown) in ELSEWHERE:
                        continue
                    if shown == "'instance %s'":
                        yield from ((name, f"instance {one}") for one in ("sleeps", "is awake"))
                    else:
                        place = source if shown.isupper() else scope
                        yield from ((name, message) for message in said(words, place))


WARNINGS = sorted(set(warnings()))


def named(page: str) -> list[str]:
    """Return what stands in the first cells of a page's tables as it is said."""
    heads = [row.split(" | ")[0] for row in re.findall(r"(?m)^\| (.*) \|$", page)]
    return [one for head in heads for one in re.findall(r"`([^`]{10,})`", head)]


@pytest.mark.parametrize(("path", "message"), WARNINGS)
def test_a_warning_has_one_row(path: str, message: str) -> None:
    of_appendix = named(LINES).count(message)
    assert of_appendix <= 1, path
    if not of_appendix:
        assert any(one in message for one in named(PAGE)), f"{path}: {message}"


def test_the_rows_are_of_what_is_said() -> None:
    messages = {message for _, message in WARNINGS}
    assert len(messages) > 60
    assert set(named(LINES)) <= messages
