"""One emulated engine: its life cycle, its requests, and their counts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.answer import json_headers
from balanceroute.proxy.lab.emulate.engine_metrics import EmulatedRankState, RankCounters
from balanceroute.proxy.lab.emulate.exchange import EngineExchange
from balanceroute.proxy.lab.emulate.faults import Faults, Frozen
from balanceroute.proxy.lab.emulate.hub import EngineCall, Hub
from balanceroute.proxy.lab.emulate.request import chat_text, check_model, compact, invalid
from balanceroute.proxy.lab.emulate.tokens import (
    decode,
    packed,
    prompt_digest,
    tokenise,
    unit_draws,
    word_of,
)
from balanceroute.proxy.wire.http1.server import Application, Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, ServerLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.lab.emulate.decoder import Decoder
    from balanceroute.proxy.lab.emulate.prefiller import EmulatedPrefiller
    from balanceroute.proxy.lab.emulate.prefix_caches import Publisher


# The routes of an engine that generate nothing.

VERSION = "0.32.0"
# No tokenizer has larger ids.
_ID_LIMIT = 1 << 63
_EMBEDDING_SIZE = 8


def answer_models(hub: Hub) -> object:
    created = hub.unix_s
    permission = {
        "id": f"modelperm-{hub.hexadecimal(16)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": hub.settings.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": hub.settings.model,
        "parent": None,
        "max_model_len": hub.settings.max_model_len,
        "permission": [permission],
    }
    adapters = [
        model | {"id": name, "parent": hub.settings.model, "max_model_len": None}
        for name in hub.settings.adapters
    ]
    return {"object": "list", "data": [model, *adapters]}


def answer_tokenize(values: dict[str, Any], hub: Hub) -> object:
    """Return the answer of /tokenize.

    Raises:
        ApiError: The body is not one of its two forms.
    """
    check_model(values, hub.settings)
    tokens = tokenise(chat_text(values) if "messages" in values else _text(values, "prompt"))
    strings = [word_of(token) for token in tokens] if values.get("return_token_strs") else None
    return {
        "count": len(tokens),
        "max_model_len": hub.settings.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def answer_detokenize(values: dict[str, Any], hub: Hub) -> object:
    """Return the answer of /detokenize.

    Raises:
        ApiError: The body has no list of token ids.
    """
    check_model(values, hub.settings)
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise invalid("list_type", "body.tokens", "Input should be a valid list", tokens)
    return {"prompt": decode(tokens)}


def answer_embeddings(values: dict[str, Any], hub: Hub) -> object:
    """Return the answer of /v1/embeddings: for each input a small vector, determined by its tokens.

    Raises:
        ApiError: The body has no input.
    """
    check_model(values, hub.settings)
    given = values.get("input")
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    inputs = given if several and isinstance(given, list) else [given]
    data: list[dict[str, object]] = []
    length = 0
    for index, item in enumerate(inputs):
        if isinstance(item, list) and not all(
            type(token) is int and 0 <= token < _ID_LIMIT for token in item
        ):
            raise invalid("list_type", "body.input", "Input should be a valid list", item)
        tokens = item if isinstance(item, list) else tokenise(_text({"input": item}, "input"))
        length += len(tokens)
        draws = unit_draws(prompt_digest(packed(tokens)))
        vector = [round(2 * draw - 1, 6) for draw in islice(draws, _EMBEDDING_SIZE)]
        data.append({"index": index, "object": "embedding", "embedding": vector})
    return {
        "id": f"embd-{hub.hexadecimal(16)}",
        "object": "list",
        "created": hub.unix_s,
        "model": hub.settings.model,
        "data": data,
        "usage": {
            "prompt_tokens": length,
            "total_tokens": length,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return value


@dataclass(frozen=True, slots=True)
class EngineRole:
    name: str  # "prefill/0", "decode/3": role and number.
    # The data-parallel ranks behind its server, by their number in the fleet.
    ranks: tuple[int, ...]
    kv_tokens: int | None  # KV tokens that fit on each; None for no limit.
    side_port: int  # Port of its KV transport; no server listens on it.
    has_bootstrap: bool = False  # Whether a second server gives decoders its engine id (Mooncake).


class Engine:
    """One emulated engine; `begin` makes the executor behind its server at each start.

    Attributes:
        paused: Whether an order paused it, or had it sleep at whatever level.
        asleep: Whether an order had it sleep.
    """

    def __init__(
        self,
        role: EngineRole,
        hub: Hub,
        *,
        begin: "Callable[[Engine], EmulatedPrefiller | Decoder]",
        routes: "Callable[[Engine], Application]",
    ) -> None:
        self.role = role
        self.alive = False
        self.engine_id = ""  # New with each start.
        self.fingerprint = ""  # `system_fingerprint` of its answers, new with each start.
        self.host = ""
        self.port = 0
        self.bootstrap_port = 0  # The bootstrap server's; 0 if there is none.
        self.faults = Faults()
        self.counters: list[RankCounters] = []
        self.work: EmulatedPrefiller | Decoder  # The executor behind the server.
        self.exchanges: dict[EngineExchange, EngineCall] = {}  # Generation requests in progress.
        self.held: dict[Reply, None] = {}  # Requests that a fault keeps unprocessed.
        self.paused = self.asleep = False
        # Of its KV cache events, the last one; None if it has had none.
        self.publisher: Publisher | None = None
        self._hub = hub
        self._begin = begin
        self._servers: list[Server] = []
        self._main: Server
        self._answer = routes(self)

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def side_port(self) -> int:
        return self.role.side_port

    @property
    def version(self) -> str:
        return self._hub.settings.engine_versions.get(self.name, VERSION)

    @property
    def url(self) -> str:
        return self._url(self.port)

    @property
    def bootstrap_url(self) -> str:
        return self._url(self.bootstrap_port) if self.bootstrap_port else ""

    def abort(self) -> int:
        """End the requests in progress, as aborted ones; return how many there were."""
        exchanges = list(self.exchanges)
        for exchange in exchanges:
            exchange.abort()
        return len(exchanges)

    def freeze(self) -> None:
        """Have its decode ranks stand still, or go on, as its faults say."""
        ranks = self.role.ranks if self.name.startswith("decode") else ()
        self._hub.barrier.thaw(ranks)
        if self.faults.frozen is not None:
            self._hub.barrier.freeze(ranks, holds=self.faults.frozen is Frozen.BARRIER)

    @property
    def idle(self) -> bool:
        return not self.exchanges and not self.held

    @property
    def connections(self) -> int:
        return sum(server.connections for server in self._servers)

    async def start(self, host: str, port: int, bootstrap_port: int) -> None:
        """Start the engine and listen on its ports; 0 is a free one.

        Raises:
            OSError: The address cannot be bound.
        """
        hub, ranks = self._hub, self.role.ranks
        self.host = host
        self.paused = self.asleep = False
        self.engine_id = hub.uuid()
        size = f"dp{len(ranks)}-" if len(ranks) > 1 else ""
        self.fingerprint = f"vllm-{self.version}-{size}{hub.hexadecimal(8)}"
        self.counters = [RankCounters() for _ in ranks]
        self.work = self._begin(self)
        await self.listen(port)
        if self.role.has_bootstrap:
            server = await self._serve(self._bootstrap, bootstrap_port)
            self.bootstrap_port = server.port
        self.alive = True
        if self.faults.refuse:
            self.refuse()

    async def listen(self, port: int) -> None:
        """Listen, for the first time or again.

        Raises:
            OSError: The address cannot be bound.
        """
        self._main = await self._serve(self._answer, port)
        self.port = self._main.port

    def refuse(self) -> None:
        """Accept no more connections; answers in progress continue. A bootstrap server stays."""
        self._main.stop_accepting()

    def kill(self) -> None:
        """End like a killed process: connections are reset, and all state is lost."""
        self.alive = False
        for exchange in list(self.exchanges):
            exchange.abandon(crashed=True)
        for server in self._servers:
            server.close()
        self._servers.clear()
        self.held.clear()
        if self.publisher is not None:
            self.publisher.close()
        self._hub.book.lose(self.engine_id)

    def lose_process(self) -> None:
        """End one of several processes behind this URL; the rest takes new connections.

        Like a pod behind a service, or an engine that is restarted at once: its connections are reset
        and its requests are lost, but a new connection reaches an engine that works.
        """
        for exchange in list(self.exchanges):
            exchange.abandon(crashed=True)
        self._main.drop_connections()
        self.held.clear()

    async def _serve(self, application: Application, port: int) -> Server:
        limits = ServerLimits(
            body_limit_bytes=64 << 20,
            body_budget_bytes=1 << 40,
            keep_alive_timeout_s=self._hub.settings.keep_alive_s,
        )
        server = Server(application, limits=limits)
        await server.start(self.host, port)
        self._servers.append(server)
        return server

    def _bootstrap(self, request: HttpRequest, reply: Reply) -> None:
        """Answer as Mooncake's bootstrap server, keyed by data-parallel rank."""
        headers = json_headers(self._hub.date())
        if request.path != b"/query":
            reply.send(404, headers, compact({"detail": "Not Found"}))
            return
        address = {"0": {"0": f"tcp://{self.host}:{self.side_port}"}}
        known = {"0": {"engine_id": self.engine_id, "worker_addr": address}}
        reply.send(200, [header for header in headers if header[0] != b"vary"], compact(known))

    def _url(self, port: int) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"

    def least_busy(self) -> int:
        """Return the rank with the fewest requests; on a tie the lowest."""
        busy = [0] * len(self.role.ranks)
        for call in self.exchanges.values():
            busy[call.rank] += 1
        return busy.index(min(busy))

    def states(self) -> list[EmulatedRankState]:
        counted = [replace(counters) for counters in self.counters]
        size = max(len(self.role.ranks), self._hub.settings.dp_size)
        for exchange, call in self.exchanges.items():
            _count(exchange, counted[call.rank])
        work = self.work
        return [
            EmulatedRankState(
                rank % size,
                work.running(i),
                work.waiting(i),
                work.arriving(i),
                work.usage(i),
                counted[i],
            )
            for i, rank in enumerate(self.role.ranks)
        ]

    def add(self, exchange: EngineExchange, call: EngineCall) -> None:
        self.exchanges[exchange] = call

    def done(self, exchange: EngineExchange) -> None:
        """Remove and count a request that ended."""
        call = self.exchanges.pop(exchange)
        counters = self.counters[call.rank]
        _count(exchange, counters)
        if exchange.opened:
            counters.prompts.add(exchange.request.prompt_tokens)
        for sequence in exchange.sequences:
            choice = sequence.choice
            if exchange.opened:
                counters.outputs.add(choice.emitted)
            counters.finished[choice.finish_reason or "abort"] += 1
            if choice.stop_reason == "recomputed":
                self._hub.lengths.handed_back(call.length_name, choice.emitted)


def _count(exchange: EngineExchange, counters: RankCounters) -> None:
    if exchange.opened:
        counters.prompt_tokens += exchange.request.prompt_tokens
        counters.generation_tokens += sum(
            sequence.choice.emitted for sequence in exchange.sequences
        )
