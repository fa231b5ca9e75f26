"""The path of a generation request from the socket to the engine."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from balanceroute.proxy.lab.emulate.answer import (
    DONE,
    AnswerFormat,
    AnswerHead,
    Choice,
    json_headers,
    stream_headers,
)
from balanceroute.proxy.lab.emulate.engine import (
    Engine,
    answer_detokenize,
    answer_embeddings,
    answer_models,
    answer_tokenize,
)
from balanceroute.proxy.lab.emulate.engine_metrics import (
    CONTENT_TYPE,
    malformed_metrics,
    render_metrics,
)
from balanceroute.proxy.lab.emulate.exchange import EngineExchange
from balanceroute.proxy.lab.emulate.faults import STATUSES, send_malformed
from balanceroute.proxy.lab.emulate.formats import ChatFormat, CompletionFormat, TokenFormat
from balanceroute.proxy.lab.emulate.hub import EngineCall
from balanceroute.proxy.lab.emulate.messages import (
    MessagesReply,
    answer_count_tokens,
    read_messages,
)
from balanceroute.proxy.lab.emulate.request import (
    ApiError,
    GenerationRequest,
    bad_request,
    compact,
    read_generation,
    read_json,
    read_tokens,
)
from balanceroute.proxy.lab.emulate.responses import ResponsesReply, read_responses
from balanceroute.proxy.lab.emulate.settings import EmulationSettings, Frontend
from balanceroute.proxy.lab.emulate.translated_reply import RustReply, TranslatedReply

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.hub import Hub
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, HttpRequest


_Read = Callable[[Mapping[str, Any], EmulationSettings], GenerationRequest]
_read_chat: _Read = partial(read_generation, chat=True)
_read_completion: _Read = partial(read_generation, chat=False)
_read_response: _Read = partial(read_generation, chat=True, clips=True)
_KINDS = {429: "RateLimitError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class EmulatedGeneration:
    """Accepts generation requests for an engine, with its faults."""

    def __init__(self, engine: Engine, hub: "Hub") -> None:
        self._engine = engine
        self._hub = hub

    def messages(self, request: "HttpRequest", reply: "Reply") -> None:
        try:
            chat = read_messages(read_json(request.body))
        except ApiError as error:
            # Of the schema, which is checked before anything knows whose API it is.
            reply.send(error.status, json_headers(self._hub.date()), error.body())
            return
        translated = replace(request, body=json.dumps(chat).encode())
        self.take(_read_chat, translated, cast("Reply", MessagesReply(reply, self._hub)))

    def responses(self, request: "HttpRequest", reply: "Reply") -> None:
        try:
            values = read_json(request.body)
            chat = read_responses(values, self._hub)
        except ApiError as error:
            reply.send(error.status, json_headers(self._hub.date()), error.body())
            return
        # vLLM does not read it here.
        headers = [field for field in request.headers if field[0] != b"x-data-parallel-rank"]
        translated = replace(request, headers=headers, body=json.dumps(chat).encode())
        own = cast("Reply", ResponsesReply(reply, values, self._hub))
        self.take(_read_response, translated, own)

    def _happens(self, probability: float) -> bool:
        # No number is drawn for an impossible fault, so that one kind of fault does not change another.
        return probability > 0 and self._hub.rng.random() < probability

    def take(self, read: _Read, request: "HttpRequest", reply: "Reply") -> None:
        engine, faults = self._engine, self._engine.faults
        if self._hub.settings.frontend is Frontend.RUST and not isinstance(reply, TranslatedReply):
            reply = cast("Reply", RustReply(reply))
        now_s = self._hub.loop.time()
        for status in STATUSES:
            if self._happens(getattr(faults, f"status_{status}")):
                self._refuse_on_purpose(request, reply, status)
                return
        if self._happens(faults.reset_before_headers):
            reply.abort()
            return
        if not faults.hang and not faults.delay_s:
            self._accept(request, reply, read, now_s)
            return
        engine.held[reply] = None
        reply.on_closed = lambda: engine.held.pop(reply, None)
        if not faults.hang:
            delay_s = self._hub.settings.seconds(1e9 * faults.delay_s)
            self._hub.loop.call_later(delay_s, self._release, request, reply, read, now_s)

    def _release(
        self, request: "HttpRequest", reply: "Reply", read: _Read, arrived_s: float
    ) -> None:
        if reply in self._engine.held:
            del self._engine.held[reply]
            reply.on_closed = None
            self._accept(request, reply, read, arrived_s)

    def _refuse_on_purpose(self, request: "HttpRequest", reply: "Reply", status: int) -> None:
        error = ApiError(
            "refused on purpose", status=status, kind=_KINDS.get(status, "BadRequestError")
        )
        self._refuse(request, reply, error)

    def _refuse(self, request: "HttpRequest", reply: "Reply", error: ApiError) -> None:
        faults, date = self._engine.faults, self._hub.date()
        if faults.errors_in_200 and b'"stream":true' in request.body.replace(b" ", b""):
            reply.start(200, stream_headers(date))
            reply.write(error.event(faults.error_form))
            reply.write(DONE)
            reply.end()
            return
        headers = json_headers(date)
        if error.status in (429, 503):
            headers.append((b"retry-after", str(faults.retry_after_s).encode()))
        status = 200 if faults.errors_in_200 else error.status
        reply.send(status, headers, error.body(faults.error_form))

    def _accept(
        self, request: "HttpRequest", reply: "Reply", read: _Read, arrived_s: float
    ) -> None:
        try:
            values = read_json(request.body)
            wanted = read(values, self._hub.settings)
            rank = self._rank(request)
        except ApiError as error:
            self._refuse(request, reply, error)
            return
        header = request.header(b"x-request-id")
        given = values.get("request_id")
        name = own = self._hub.hexadecimal(16)
        if isinstance(given, str):
            name = own = given
        if header is not None:
            name = header.decode("latin-1")
        # A router that makes ids of its own replaces the header, and leaves the body as it is.
        named = name if self._hub.lengths.of(name) is not None else own
        session = (request.header(b"x-session-id") or b"").decode("latin-1")
        self._begin(
            wanted, reply, name, rank, length_name=named, arrived_s=arrived_s, session=session
        )

    def _rank(self, request: "HttpRequest") -> int:
        """Return the rank that a request names, or the least busy one.

        Raises:
            ApiError: There is no such rank.
        """
        ranks = len(self._engine.role.ranks)
        try:
            rank = int(request.header(b"x-data-parallel-rank") or b"")
        except ValueError:
            return self._engine.least_busy()
        if not 0 <= rank < ranks:
            raise bad_request(f"data_parallel_rank {rank} is out of range [0, {ranks}).")
        return rank

    def _length(self, wanted: GenerationRequest, name: str) -> int | None:
        length = self._hub.lengths.of(name)
        if length is not None and (wanted.kv or {}).get("do_remote_decode") is True:
            # The decode leg emits the answer; the first token of the prefill must not end it.
            return max(wanted.max_tokens) + 1
        return length

    def _begin(
        self,
        wanted: GenerationRequest,
        reply: "Reply",
        name: str,
        rank: int,
        *,
        length_name: str,
        arrived_s: float,
        session: str,
    ) -> None:
        engine, hub = self._engine, self._hub
        settings, faults = hub.settings, engine.faults
        kind = "chatcmpl" if wanted.chat else "cmpl"
        request_id = f"{kind if wanted.token_output is None else 'generate-tokens'}-{name}"
        length = self._length(wanted, length_name)
        cached = settings.prompt_tokens_details
        if isinstance(reply, TranslatedReply) and faults.malformed is not None:
            reply.spoil(faults.malformed)
            faults = faults.changed({"malformed": None})
        if isinstance(reply, ResponsesReply):
            reply.open(wanted.max_tokens[0])
            cached = True
        head = AnswerHead(request_id, hub.unix_s, settings.model, engine.fingerprint, cached)
        answer_format = _format(wanted, head)
        choices = self._choices(wanted, length)
        exchange = EngineExchange(
            wanted,
            reply,
            answer_format,
            faults,
            choices=choices,
            on_done=engine.done,
            respond=self._respond,
        )
        call = EngineCall(
            exchange,
            request_id,
            hub.hexadecimal(8),
            rank,
            length_name,
            arrived_s,
            drop_kv=self._happens(faults.drop_kv_params),
            alien_kv=self._happens(faults.alien_kv_params),
            session=session,
        )
        engine.add(exchange, call)
        exchange.start(stream_headers(hub.date()))
        if faults.stopping and not exchange.over:
            exchange.abort()
        elif not exchange.over:
            engine.work.serve(call)

    def _choices(self, wanted: GenerationRequest, length: int | None) -> list[Choice]:
        settings = self._hub.settings
        eos_first = self._happens(self._engine.faults.eos_first)
        return [
            Choice(
                wanted,
                number * wanted.n + i,
                prompt,
                wanted.max_tokens[number],
                settings.mean_output_tokens,
                eos_first=eos_first,
                length=length,
                partial_utf8=settings.partial_utf8,
                merged_outputs=settings.merged_outputs,
            )
            for number, prompt in enumerate(wanted.prompts)
            for i in range(wanted.n)
        ]

    def _respond(self, exchange: EngineExchange, status: int, body: bytes) -> None:
        headers, reply = json_headers(self._hub.date()), exchange.reply
        if isinstance(reply, TranslatedReply):
            body, reply = reply.translated(status, body), reply.reply
        if status == 200 and exchange.faults.malformed_answer is not None:
            send_malformed(reply, headers, body, exchange.faults)
        else:
            reply.send(status, headers, body)


def _format(wanted: GenerationRequest, head: AnswerHead) -> AnswerFormat:
    if wanted.token_output is not None:
        return TokenFormat(wanted, head, wanted.token_output)
    return ChatFormat(wanted, head) if wanted.chat else CompletionFormat(wanted, head)


_EMULATION = b"/emulation/"


class Routes:
    """Answers the requests of an engine's server."""

    def __init__(self, engine: Engine, hub: "Hub") -> None:
        self._engine = engine
        self._hub = hub
        generation = EmulatedGeneration(engine, hub)
        self._routes: dict[bytes, tuple[bytes, Callable[[HttpRequest, Reply], None]]] = {
            b"/v1/chat/completions": (b"POST", partial(generation.take, _read_chat)),
            b"/v1/completions": (b"POST", partial(generation.take, _read_completion)),
            b"/v1/messages": (b"POST", generation.messages),
            b"/v1/responses": (b"POST", generation.responses),
            b"/inference/v1/generate": (b"POST", partial(generation.take, read_tokens)),
            b"/v1/messages/count_tokens": (b"POST", self._posted(answer_count_tokens)),
            b"/tokenize": (b"POST", self._posted(answer_tokenize)),
            b"/detokenize": (b"POST", self._posted(answer_detokenize)),
            b"/v1/embeddings": (b"POST", self._posted(answer_embeddings)),
            # With VLLM_SERVER_DEV_MODE=1.
            b"/pause": (b"POST", self._pause),
            b"/resume": (b"POST", self._resume),
            b"/abort_requests": (b"POST", self._abort),
            b"/is_paused": (b"GET", self._got(lambda: {"is_paused": engine.paused})),
            b"/sleep": (b"POST", self._sleep),
            b"/wake_up": (b"POST", self._wake_up),
            b"/is_sleeping": (b"GET", self._got(lambda: {"is_sleeping": engine.paused})),
            b"/v1/models": (b"GET", self._got(lambda: answer_models(hub))),
            b"/version": (b"GET", self._got(lambda: {"version": engine.version})),
            b"/load": (b"GET", self._got(lambda: {"server_load": len(engine.exchanges)})),
            b"/health": (b"GET", self._health),
            b"/ping": (b"GET, POST", self._health),
            b"/metrics": (b"GET", self._metrics),
        }

    def answer(self, request: "HttpRequest", reply: "Reply") -> None:
        if request.path.startswith(_EMULATION):
            name = request.path.removeprefix(_EMULATION).decode("latin-1")
            status, value = self._hub.control(request.method, name, request.body)
            self._send(reply, status, value)
            return
        route = self._routes.get(request.path)
        if route is None:
            self._send(reply, 404, {"detail": "Not Found"})
            return
        methods, handler = route
        if request.method in methods.split(b", "):
            handler(request, reply)
            return
        headers = [*json_headers(self._hub.date()), (b"allow", methods)]
        reply.send(405, headers, compact({"detail": "Method Not Allowed"}))

    def _pause(self, request: "HttpRequest", reply: "Reply") -> None:
        # It serves requests that come meanwhile: a client that pauses an engine sends none.
        self._engine.paused = True
        if b"mode=wait" not in request.query:
            self._engine.abort()
        self._send(reply, 200, {"status": "paused"})

    def _resume(self, request: "HttpRequest", reply: "Reply") -> None:
        del request
        self._engine.paused = False
        self._send(reply, 200, {"status": "resumed"})

    def _sleep(self, request: "HttpRequest", reply: "Reply") -> None:
        self._engine.paused = self._engine.asleep = True
        if b"mode=wait" not in request.query:
            self._engine.abort()
        self._send(reply, 200, {"status": "sleeping", "level": 1})

    def _wake_up(self, request: "HttpRequest", reply: "Reply") -> None:
        # With one tag a part of its memory comes back, and the engine sleeps on.
        if request.query.count(b"tags=") != 1:
            self._engine.paused = self._engine.asleep = False
        status = "sleeping" if self._engine.asleep else "awake"
        self._send(reply, 200, {"status": status, "tags": None})

    def _abort(self, request: "HttpRequest", reply: "Reply") -> None:
        del request
        self._send(reply, 200, {"status": "aborted", "aborted": self._engine.abort()})

    def _send(self, reply: "Reply", status: int, value: object) -> None:
        reply.send(status, json_headers(self._hub.date()), compact(value))

    def _got(self, answer: Callable[[], object]) -> "Callable[[HttpRequest, Reply], None]":
        return lambda _, reply: self._send(reply, 200, answer())

    def _posted(
        self, answer: "Callable[[dict[str, Any], Hub], object]"
    ) -> "Callable[[HttpRequest, Reply], None]":
        def handler(request: "HttpRequest", reply: "Reply") -> None:
            try:
                value = answer(read_json(request.body), self._hub)
            except ApiError as error:
                self._send(reply, error.status, error.value)
                return
            self._send(reply, 200, value)

        return handler

    def _health(self, request: "HttpRequest", reply: "Reply") -> None:
        del request
        status = 503 if self._engine.faults.unhealthy else 200
        reply.send(status, self._headers(None), b"")

    def _metrics(self, request: "HttpRequest", reply: "Reply") -> None:
        del request
        slow_s = self._engine.faults.slow_scrape_s
        if slow_s:
            self._hub.loop.call_later(slow_s, self._scraped, reply)
        else:
            self._scraped(reply)

    def _scraped(self, reply: "Reply") -> None:
        engine, settings = self._engine, self._hub.settings
        status, page = (
            200,
            render_metrics(
                settings.model,
                engine.states(),
                block_tokens=settings.block_tokens,
                kv_tokens=engine.role.kv_tokens,
                awake=not engine.asleep,
                nixl=settings.connector == "nixl",
            ),
        )
        if engine.faults.malformed_scrape is not None:
            status, page = malformed_metrics(engine.faults.malformed_scrape, page)
        reply.send(status, self._headers(CONTENT_TYPE), page)

    def _headers(self, kind: bytes | None) -> "Headers":
        headers = [field for field in json_headers(self._hub.date()) if field[0] != b"content-type"]
        if kind is not None:
            headers.insert(2, (b"content-type", kind))
        return headers
