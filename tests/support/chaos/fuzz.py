"""Hostile requests against the whole proxy in virtual time, and a canary request after each.

What must hold: no answer of 500 or more that the proxy made itself, every refusal in the API's shape,
and the next honest request answered as one engine answers it.
"""

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from tests.support.chaos.clients import (
    Client,
    ClientAnswerReader,
    ClientEnding,
    Received,
    Visit,
)
from tests.support.chaos.expectation import TextOracle, comparable
from tests.support.chaos.log_capture import violations_of
from tests.support.chaos.requests import CHAT, ClientRequest, RequestMix, draw_request
from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.wire.messages import MalformedError
from balanceroute.topologies import CONNECTORS

# Hostile requests drawn from a generator: bodies and heads that no honest client sends.
#
# A case begins as a request that would be served. Then its members, its JSON, its encoding, its
# head or its bytes are spoiled, often in several ways at a time.

# Where an integer changes its representation somewhere, and what is no integer at all.
_NUMBERS = (
    "0", "-0", "1", "-1", "2", "127", "128", "129", "255", "256", "65536",
    "2147483646", "2147483647", "2147483648", "-2147483648", "-2147483649", "4294967295",
    "4294967296", "9007199254740991", "9007199254740992", "9007199254740993",
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "18446744073709551615", "18446744073709551616", "1" + "0" * 400, "-1" + "0" * 400,
    "9" * 5_000, "0.1", "-0.5", "1.0", "20.0", "2.5", "1e2", "1E+2", "1e308", "1e309", "-1e400",
    "5e-324", "1e-400", "0.0", "NaN", "Infinity", "-Infinity", "nan", "0x10", "1_000", "+1", "01",
    ".5", "1.", "1e", "--1", '"1"', '"20"', '" 7 "', '"1e3"', '"NaN"', '""', "true", "false", "null",
    "[]", "[1]", "{}", '{"a": 1}',
)  # fmt: skip
_NUMERIC = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of",
    "logprobs", "top_logprobs", "prompt_logprobs", "seed", "priority", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "truncate_prompt_tokens", "stop_token_ids", "timeout", "stream", "echo",
    "ignore_eos", "use_beam_search", "data_parallel_rank", "thinking_token_budget",
    "stream_interval", "routed_experts_prompt_start", "watermarking", "include_reasoning",
)  # fmt: skip
_MEMBERS = (
    *_NUMERIC, "model", "messages", "prompt", "input", "suffix", "stop", "stream_options", "tools",
    "tool_choice", "response_format", "user", "logit_bias", "vllm_xargs", "kv_transfer_params",
    "ec_transfer_params", "request_id", "metadata", "prompt_embeds", "structured_outputs",
    "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "bad_words",
    "return_token_ids", "previous_response_id", "background", "store", "system", "",
    "session_id", "truncation_side", "repetition_detection", "logprob_token_ids", "allowed_token_ids",
    "return_prompt_text", "return_tokens_as_token_ids", "cache_salt", "reasoning_effort",
    "instructions", "include", "text", "reasoning", "thinking", "context_management", "output_config",
    "stop_sequences", "parallel_tool_calls", "prompt_cache_key", "max_tool_calls", "conversation",
    "previous_input_messages", "enable_response_messages", "service_tier", "truncation",
    "\u0000", "max_tokens\u0000", "Max_Tokens", "__proto__", "\ud800", "x" * 5_000,
)  # fmt: skip
_VALUES = (
    '"a"', '""', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude42"', '"\\x"',
    '"\u2028"', '"recomputed"', "[[]]", "[{}]", "[[1, 2], [3]]", "[1, \"a\"]", '["a", 1]',
    "[[1], [2, [3]]]", '{"include_usage": true}', '{"include_usage": 1, "a": [[[]]]}',
    '[{"role": "user"}]', '[{"role": "user", "content": 7}]', '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]',
    '[{"role": 5, "content": {}}]', '{"type": "json_schema"}', '{"kv_transfer_params": "{}"}',
    '{"do_remote_decode": true, "remote_host": "169.254.169.254"}', '"required"', '"named"',
    '[{"type": "function_call"}]', '[{"type": "reasoning", "content": [7]}]', '[{"type": 7}, 7]',
    '[{"type": "message", "role": "assistant", "status": "incomplete", "content": [[]]}]',
    '[{"role": "user", "content": [{"type": "tool_result", "content": [7]}, 7]}]',
    '[{"type": "namespace", "name": "a", "tools": 7}]', '[{"type": "custom", "name": "a", "format": 7}]',
    '{"type": "enabled", "budget_tokens": "7"}', '{"type": "tool"}', '{"format": {"type": []}}',
    '["message.output_text.logprobs", 7]', '{"type": "custom", "name": []}',
    '["\\n", "", "a"]', "tru", "nul", "'a'", "", ",", "]", "}",
)  # fmt: skip
_PATHS = (
    CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models", "/v1/models/emulated", "/health",
    "/ready", "/version", "/metrics", "/ping", "/load", "/v1/metaserver/", "/v1/metaserver/abc",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/classify",
    "/v1/audio/transcriptions", "/inference/v1/generate", "/invocations", "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel", "/", "/v1", "//v1/chat/completions", "/v1/chat/completions/",
    "/v1/chat/completions?a=b", "/v1/chat/../completions", "/%76%31/chat/completions",
    "/v1/load_lora_adapter", "/admin/state",
)  # fmt: skip
_METHODS = (
    "POST", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "post", "X",
    "POST ", "PO\tST", "M" * 40, "",
)  # fmt: skip
_TARGETS = (
    "*", "http://proxy/v1/chat/completions", "https://other:1/v1/models", "proxy:80",
    "/v1/chat/completions#a", "/\x00", "/\xff", "/" + "a" * 9_000, "v1/chat/completions", "/ /", "",
    "http://[::1/v1/models", "http://@/health", "/v1/models?" + "q" * 4_000,
)  # fmt: skip
_VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.2", "http/1.1", "HTTP/11", "")
_TYPES = (
    "application/json", "application/json; charset=utf-8", "application/json; charset=utf-16",
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "multipart/form-data", "application/octet-stream", "text/event-stream", "application/xml",
    "application/JSON", "application/jsonp", ";", "", "\x7f", "a" * 9_000,
)  # fmt: skip
_HEADERS = (
    ("content-length", "0"), ("content-length", "-1"), ("content-length", "+5"),
    ("content-length", "5, 5"), ("content-length", "1e3"), ("content-length", "9" * 30),
    ("content-length", "99999999999"), ("content-length", ""), ("transfer-encoding", "chunked"),
    ("transfer-encoding", "gzip, chunked"), ("transfer-encoding", "identity"),
    ("transfer-encoding", "chunked, chunked"), ("transfer-encoding", "xchunked"),
    ("content-encoding", "gzip"), ("content-encoding", "br"), ("expect", "100-continue"),
    ("expect", "magic"), ("connection", "close"), ("connection", "upgrade"), ("upgrade", "h2c"),
    ("connection", "content-length"), ("host", ""), ("host", "a b"), ("host", "evil.example"),
    ("x-request-id", "ok-1"), ("x-request-id", "a" * 129), ("x-request-id", "a b"),
    ("x-request-id", "\xe9"), ("x-request-id", ""), ("authorization", "Bearer x"),
    ("authorization", "Basic \xff"), ("x-api-key", "k"), ("origin", "http://evil.example"),
    ("transfer-encoding", "\x0bchunked"), ("transfer-encoding", "identity, chunked"),
    ("transfer-encoding ", "chunked"), ("content-length", "5\x0b"), ("content-length", "0x5"),
    ("content-length", "1_0"), ("content-length", "00000000000000000005"), ("expect", "100-Continue"),
    ("x-data-parallel-rank", "99"), ("traceparent", "00-zz"), ("accept", "text/event-stream"),
    ("cookie", "a" * 2_000), ("bad name", "x"), ("x\x00", "y"), ("x", "a\x00b"), ("x", "a\rb"),
    ("", "x"), (" folded", "x"), ("x", "y" * 40_000), ("range", "bytes=0-1"),
    ("content-type", "text/plain"),
)  # fmt: skip
_CODECS = ("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "utf-7", "cp1252")
_DEEPEST = 3_000
_ODD_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """What a hostile client sends on one connection."""

    kinds: tuple[str, ...]  # In which ways it is spoiled.
    data: bytes  # The bytes.
    cuts: tuple[int, ...]  # Places at which it is sent in pieces.
    half_closes: bool  # Whether the client ends its side after the last byte.


class _Draft:
    """A request that is being spoiled."""

    def __init__(self, rng: random.Random, number: int) -> None:
        request = draw_request(rng, number, RequestMix("emulated", big=0.0, odd=_ODD_SHARE))
        self.rng = rng
        self.members = [(key, json.dumps(value)) for key, value in request.values.items()]
        self.path = request.path
        self.method = "POST"
        self.version = "HTTP/1.1"
        self.headers = [("host", "proxy"), ("content-type", "application/json")]
        self.spoil_text: list[Callable[[str], str]] = []
        self.spoil_body: list[Callable[[bytes], bytes]] = []
        self.spoil_head: list[Callable[[bytes], bytes]] = []
        self.chunked = False

    def set(self, key: str, text: str) -> None:
        """Set a member, JSON as it is to stand there; a second time now and then."""
        if self.rng.random() < 0.95:
            self.members = [member for member in self.members if member[0] != key]
        self.members.insert(self.rng.randint(0, len(self.members)), (key, text))

    def message(self) -> bytes:
        pieces = [f"{json.dumps(key)}: {text}" for key, text in self.members]
        text = "{" + ", ".join(pieces) + "}"
        for spoil in self.spoil_text:
            text = spoil(text)
        body = text.encode("utf-8", "surrogatepass")
        for spoil_bytes in self.spoil_body:
            body = spoil_bytes(body)
        headers = list(self.headers)
        if self.chunked:
            headers.append(("transfer-encoding", "chunked"))
            body = _chunked(self.rng, body)
        elif not any(name == "content-length" for name, _ in headers):
            headers.append(("content-length", str(len(body))))
        head = f"{self.method} {self.path} {self.version}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers)
        data = (head + "\r\n").encode("latin-1", "replace")
        for spoil_bytes in self.spoil_head:
            data = spoil_bytes(data)
        return data + body


def draw_case(rng: random.Random, number: int) -> FuzzCase:
    """Return a case; the same state of `rng` gives the same one."""
    draft = _Draft(rng, number)
    kinds = []
    for _ in range(1 + int(rng.expovariate(1.2))):
        spoil = rng.choice(_SPOILS)
        spoil(draft)
        kinds.append(spoil.__name__.removeprefix("_"))
    data = draft.message()
    if rng.random() < 0.02:
        kinds.append("pipelined")
        data += _Draft(rng, number).message()
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice((0, 0, 0, 1, 5))))
    return FuzzCase(tuple(kinds), data, tuple(cuts), rng.random() < 0.02)


# The ways to spoil a request. Their names are the kinds.


def _number(draft: _Draft) -> None:
    draft.set(draft.rng.choice(_NUMERIC), draft.rng.choice(_NUMBERS))


def _several_numbers(draft: _Draft) -> None:
    for _ in range(draft.rng.randint(2, 6)):
        _number(draft)


def _number_inside(draft: _Draft) -> None:
    number = draft.rng.choice(_NUMBERS)
    key, text = draft.rng.choice(
        (
            ("logit_bias", '{"5": %s}'),
            ("stop_token_ids", "[%s]"),
            ("prompt", "[1, %s, 3]"),
            ("prompt", "[[%s], [1]]"),
            ("messages", '[{"role": "user", "content": %s}]'),
            ("stream_options", '{"include_usage": %s, "continuous_usage_stats": %s}'),
            ("vllm_xargs", '{"a": %s}'),
            ("thinking", '{"type": "enabled", "budget_tokens": %s}'),
        )
    )
    draft.set(key, text.replace("%s", number))


def _member(draft: _Draft) -> None:
    draft.set(draft.rng.choice(_MEMBERS), draft.rng.choice((*_VALUES, *_NUMBERS)))


def _missing_member(draft: _Draft) -> None:
    if draft.members:
        draft.members.pop(draft.rng.randrange(len(draft.members)))


def _nesting(draft: _Draft) -> None:
    depth = draft.rng.choice((50, 99, 100, 101, 500, 990, 1_000, _DEEPEST))
    opening, closing = draft.rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    core = draft.rng.choice(("1", "", '"a"', "[]"))
    draft.set(draft.rng.choice(_MEMBERS), opening * depth + core + closing * depth)


def _many_values(draft: _Draft) -> None:
    piece = draft.rng.choice(("[]", "{}", "1", '"a"', '{"role": "user", "content": "a"}'))
    count = draft.rng.choice((100, 129, 5_000))
    draft.set(
        draft.rng.choice(("prompt", "messages", "stop", "x")), f"[{', '.join([piece] * count)}]"
    )


def _twice(draft: _Draft) -> None:
    key, text = draft.rng.choice(draft.members or [("a", "1")])
    draft.members.append((key, draft.rng.choice((text, *_NUMBERS))))


def _encoding(draft: _Draft) -> None:
    codec = draft.rng.choice(_CODECS)
    draft.spoil_body.append(lambda body: body.decode("utf-8", "replace").encode(codec, "replace"))


def _json_text(draft: _Draft) -> None:
    rng = draft.rng
    kind = rng.randrange(8)
    place = rng.random()

    def spoil(text: str) -> str:
        at = int(place * len(text))
        return (
            text[:at],
            text[at:],
            text + text,
            f"[{text}]",
            text + rng.choice(("}", ",", " x", "\x00", "//")),
            text[:at]
            + rng.choice(('"', "\\", "{", "[", ",", ":", "\n", "\x00", "\x1f"))
            + text[at:],
            rng.choice(
                ("", "null", "1", '"a"', "[]", "{}", "{", '{"a"', '{"a":', "{,}", "\ufeff{}")
            ),
            "/* a */" + text,
        )[kind]

    draft.spoil_text.append(spoil)


def _bytes(draft: _Draft) -> None:
    rng = draft.rng
    places = [rng.random() for _ in range(rng.randint(1, 4))]
    values = [rng.randrange(256) for _ in places]

    def spoil(body: bytes) -> bytes:
        spoiled = bytearray(body or b"\x00")
        for place, value in zip(places, values, strict=True):
            spoiled[int(place * len(spoiled))] = value
        return bytes(spoiled)

    rng.choice((draft.spoil_body, draft.spoil_head)).append(spoil)


def _compressed(draft: _Draft) -> None:
    draft.spoil_body.append(lambda body: gzip.compress(body, mtime=0))
    if draft.rng.random() < 0.7:
        draft.headers.append(("content-encoding", "gzip"))


def _path(draft: _Draft) -> None:
    draft.path = draft.rng.choice(_PATHS)
    if draft.rng.random() < 0.3:
        draft.method = "GET"


def _target(draft: _Draft) -> None:
    draft.path = draft.rng.choice(_TARGETS)


def _method(draft: _Draft) -> None:
    draft.method = draft.rng.choice(_METHODS)


def _version(draft: _Draft) -> None:
    draft.version = draft.rng.choice(_VERSIONS)


def _content_type(draft: _Draft) -> None:
    draft.headers = [header for header in draft.headers if header[0] != "content-type"]
    if draft.rng.random() < 0.9:
        draft.headers.append(("content-type", draft.rng.choice(_TYPES)))


def _header(draft: _Draft) -> None:
    draft.headers.insert(draft.rng.randint(0, len(draft.headers)), draft.rng.choice(_HEADERS))


def _missing_header(draft: _Draft) -> None:
    if draft.headers:  # Else earlier spoils have taken all.
        draft.headers.pop(draft.rng.randrange(len(draft.headers)))


def _many_headers(draft: _Draft) -> None:
    draft.headers += [(f"x-{i}", "y") for i in range(draft.rng.choice((90, 101, 400)))]


def _chunks(draft: _Draft) -> None:
    draft.chunked = True


def _line_ends(draft: _Draft) -> None:
    end = draft.rng.choice((b"\n", b"\r", b"\r\r\n", b"\n\r\n"))
    draft.spoil_head.append(lambda head: head.replace(b"\r\n", end))


def _other_protocol(draft: _Draft) -> None:
    hello = draft.rng.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\x00" * 64,
            b"SSH-2.0-x\r\n",
            b"\r\n\r\n\r\n",
            draft.rng.randbytes(200),
        )
    )
    draft.spoil_head.append(lambda _: hello)


_SPOILS: tuple[Callable[[_Draft], None], ...] = (
    # Numbers as often as all else: they pass the parser and reach everything behind it.
    *[_number] * 6,
    *[_several_numbers] * 2,
    *[_number_inside] * 3,
    *[_member] * 4,
    _missing_member,
    _nesting,
    _many_values,
    _twice,
    _encoding,
    _json_text,
    _bytes,
    _compressed,
    _path,
    _target,
    _method,
    _version,
    _content_type,
    _header,
    _missing_header,
    _many_headers,
    _chunks,
    _line_ends,
    _other_protocol,
)


def _chunked(rng: random.Random, body: bytes) -> bytes:
    """Return a body in chunks, some of whose sizes are none."""
    pieces: list[Any] = []
    size = rng.choice((1, 7, 100, 4_096))
    for begin in range(0, len(body), size):
        piece = body[begin : begin + size]
        pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    pieces.append(
        rng.choice(
            (b"0\r\n\r\n",) * 6
            + (b"", b"0\r\nx: y\r\n\r\n", b"-1\r\n", b"fffffffffffffffff\r\n")
            + (b"0\n\n", b"0;\r\n\r\n", b"+0\r\n\r\n", b'0;a="\r\n"\r\n\r\n', b"0 \r\n\r\n")
            + (b"0\r\ncontent-length: 9\r\n\r\n", b"0\r\n folded\r\n\r\n", b"0;a\x00\r\n\r\n")
        )
    )
    return b"".join(pieces)


_CANARIES = 24
# A case whose answer goes on is left by its client after this time.
_PATIENCE_S = 0.2
_QUIET_S = 12.0
# Not of the proxy's own making: it says that it does not do what was asked.
_HONEST = frozenset({501, 505})
_LONGEST_S = 1e9
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True)
class FuzzReport:
    """What came of the cases of one seed."""

    seed: int
    cases: int
    kinds: Counter[str] = field(default_factory=Counter)
    # What they were answered; 0 if nothing.
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)  # What must not be.


def fuzz(seed: int, *, cases: int) -> FuzzReport:
    """Send the cases of a seed, one after another, each with a canary behind it.

    The seed also chooses the connector.
    """
    report = FuzzReport(seed, cases)
    report.violations += violations_of(
        lambda _: run(lambda loop: _Run(loop, report).run(), seed=seed, limit_s=_LONGEST_S)
    )
    return report


class _Run:
    """The cases of one seed."""

    def __init__(self, loop: VirtualLoop, report: FuzzReport) -> None:
        self._loop = loop
        self._report = report
        self._rng = random.Random(f"fuzz {report.seed}")
        connectors = list(CONNECTORS)
        self._settings = EmulationSettings(
            ranks=2,
            batch_limit=64,
            step_base_ns=1_000_000,
            prefill_base_ns=200_000,
            connector=connectors[report.seed % len(connectors)],
            mean_output_tokens=8.0,
        )

    async def run(self) -> None:
        loop, rng, report = self._loop, self._rng, self._report
        world = World(WorldSettings(self._settings, {"policy": "br-h", "batch": 64}), loop, rng)
        await world.start()
        await asyncio.sleep(2.0)  # Some prefillers take requests only once they are known.
        canaries = await self._canaries()
        for number in range(report.cases):
            case = draw_case(rng, number)
            report.kinds.update(case.kinds)
            self._judge(number, case, await self._send(case, world.port))
            request, expected = canaries[number % len(canaries)]
            await self._check_canary(world, number, case, request, expected)
        await asyncio.sleep(_QUIET_S)
        if not world.proxy.deployment.driver.idle:
            report.violations.append(f"held: {list(world.proxy.deployment.driver.sessions)}")
        world.scheduler.check()
        await world.close()

    async def _send(self, case: FuzzCase, port: int) -> "_Probe":
        probe = _Probe(case, self._loop)
        await self._loop.create_connection(lambda: probe, "127.0.0.1", port)
        await probe.run()
        return probe

    async def _canaries(self) -> list[tuple[ClientRequest, bytes]]:
        """Return honest requests with their answers."""
        oracle = TextOracle(self._settings)
        await oracle.start()
        mix = RequestMix(
            self._settings.model, mean_prompt_words=5.0, max_tokens=4, big=0.0, odd=0.0
        )
        found: list[tuple[ClientRequest, bytes]] = []
        number = 10_000_000  # No case has one of these.
        while len(found) < _CANARIES:
            number += 1
            request = draw_request(self._rng, number % 1_000, mix)
            # Choices that share a stream come in any order.
            limits = {"max_tokens", "max_output_tokens"}
            if limits & request.values.keys() and not _has_choices(request.values):
                answer = await oracle.answer(request)
                found.append((request, comparable(answer.body, request.request_id)))
        await oracle.close()
        return found

    async def _check_canary(
        self, world: World, number: int, case: FuzzCase, request: ClientRequest, expected: bytes
    ) -> None:
        client = Client(Visit(0.0, (request,), close=True), on_left=lambda _: None)
        await self._loop.create_connection(lambda: client, "127.0.0.1", world.port)
        try:
            await asyncio.wait_for(client.over.wait(), 30.0)
        except TimeoutError:
            self._violate(number, case, f"the canary {request.body[:200]!r} hangs")
            return
        received = client.answers[0]
        got = comparable(bytes(received.body), request.request_id)
        if received.status != 200 or got != expected:
            self._violate(number, case, f"the canary got {received.status} {got[:300]!r}")

    def _judge(self, number: int, case: FuzzCase, probe: "_Probe") -> None:
        if probe.malformed:
            self._violate(number, case, f"an answer that is no HTTP: {probe.malformed}")
        for answer in probe.answers:
            self._report.statuses[answer.status] += 1
            if answer.status >= 500 and answer.status not in _HONEST:
                self._violate(number, case, f"{answer.status} {bytes(answer.body[:300])!r}")
            if (
                answer.status >= 400
                and answer.ending is ClientEnding.COMPLETE
                and not _says_why(answer)
            ):
                self._violate(
                    number, case, f"{answer.status} without a reason: {bytes(answer.body[:300])!r}"
                )

    def _violate(self, number: int, case: FuzzCase, what: str) -> None:
        self._report.violations.append(
            f"case {number} ({', '.join(case.kinds)}): {what}; sent {case.data[:600]!r}"
        )


class _Probe(asyncio.Protocol):
    """The connection of one case."""

    def __init__(self, case: FuzzCase, loop: VirtualLoop) -> None:
        self.answers = [Received()]  # What came, in order.
        self.malformed = ""  # Why something that came is no HTTP; empty if all is.
        self._case = case
        self._loop = loop
        self._reader = ClientAnswerReader(self.answers[0])
        self._transport: asyncio.Transport | None = None
        self._over = asyncio.Event()
        self._is_head = case.data.startswith(b"HEAD ")

    async def run(self) -> None:
        """Send the case and wait for the end of its answer, for a while."""
        begin = 0
        for cut in (*self._case.cuts, len(self._case.data)):
            if self._transport is None:
                break
            self._transport.write(self._case.data[begin:cut])
            begin = cut
            await asyncio.sleep(0.0005)
        if self._case.half_closes and self._transport is not None:
            self._transport.write_eof()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _PATIENCE_S)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data.removeprefix(_CONTINUE))
        except MalformedError as error:
            self.malformed = str(error)
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.malformed:
            self._reader.end(was_reset=exc is not None)
        self._over.set()

    def _read(self, data: bytes) -> None:
        if self._is_head:  # Its answer has no body, whatever the head says.
            self.answers[0].body += data
            self._over.set()
            return
        while data:
            self._reader.feed(data)
            if self.answers[-1].ending is not ClientEnding.COMPLETE:
                return
            data = self._reader.rest
            if "pipelined" not in self._case.kinds:
                self._over.set()
                return
            self.answers.append(Received())
            self._reader = ClientAnswerReader(self.answers[-1])


def _has_choices(values: dict[str, Any]) -> bool:
    prompt = values.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return values.get("n", 1) > 1 or several


def _says_why(answer: Received) -> bool:
    """Return whether a refusal is a JSON object with a message."""
    try:
        value = json.loads(answer.body)
    except ValueError:
        return False
    # An engine that lacks a route says so in FastAPI's words.
    return isinstance(value, dict) and isinstance(
        value.get("error", value.get("detail")), dict | str
    )
