"""vLLM's HTTP routes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.answer import json_headers
from balanceroute.proxy.lab.emulate.api_error import ApiError, compact
from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.lab.emulate.engine_metrics import (
    CONTENT_TYPE,
    malformed_metrics,
    render_metrics,
)
from balanceroute.proxy.lab.emulate.generation import Generation
from balanceroute.proxy.lab.emulate.messages import answer_count_tokens
from balanceroute.proxy.lab.emulate.request import read_json
from balanceroute.proxy.lab.emulate.small_routes import (
    answer_detokenize,
    answer_embeddings,
    answer_models,
    answer_tokenize,
)

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.hub import Hub
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, Request

_EMULATION = b"/emulation/"


class Routes:
    """Answers the requests of an engine's server."""

    def __init__(self, engine: Engine, hub: "Hub") -> None:
        self._engine = engine
        self._hub = hub
        generation = Generation(engine, hub)
        self._routes: dict[bytes, tuple[bytes, Callable[[Request, Reply], None]]] = {
            b"/v1/chat/completions": (b"POST", generation.chat),
            b"/v1/completions": (b"POST", generation.completion),
            b"/v1/messages": (b"POST", generation.messages),
            b"/v1/responses": (b"POST", generation.responses),
            b"/inference/v1/generate": (b"POST", generation.tokens),
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

    def answer(self, request: "Request", reply: "Reply") -> None:
        """Answer a request: the server's application."""
        if request.path.startswith(_EMULATION):
            name = request.path.removeprefix(_EMULATION).decode("latin-1")
            status, value = self._hub.control.handle(request.method, name, request.body)
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

    def _pause(self, request: "Request", reply: "Reply") -> None:
        # What comes meanwhile is served: nobody who pauses an engine sends to it.
        self._engine.paused = True
        if b"mode=wait" not in request.query:
            self._engine.abort()
        self._send(reply, 200, {"status": "paused"})

    def _resume(self, request: "Request", reply: "Reply") -> None:
        del request
        self._engine.paused = False
        self._send(reply, 200, {"status": "resumed"})

    def _sleep(self, request: "Request", reply: "Reply") -> None:
        self._engine.paused = self._engine.asleep = True
        if b"mode=wait" not in request.query:
            self._engine.abort()
        self._send(reply, 200, {"status": "sleeping", "level": 1})

    def _wake_up(self, request: "Request", reply: "Reply") -> None:
        # With one tag a part of its memory comes back, and the engine sleeps on.
        if request.query.count(b"tags=") != 1:
            self._engine.paused = self._engine.asleep = False
        status = "sleeping" if self._engine.asleep else "awake"
        self._send(reply, 200, {"status": status, "tags": None})

    def _abort(self, request: "Request", reply: "Reply") -> None:
        del request
        self._send(reply, 200, {"status": "aborted", "aborted": self._engine.abort()})

    def _send(self, reply: "Reply", status: int, value: object) -> None:
        reply.send(status, json_headers(self._hub.date()), compact(value))

    def _got(self, answer: Callable[[], object]) -> "Callable[[Request, Reply], None]":
        return lambda _, reply: self._send(reply, 200, answer())

    def _posted(
        self, answer: "Callable[[dict[str, Any], Hub], object]"
    ) -> "Callable[[Request, Reply], None]":
        def handler(request: "Request", reply: "Reply") -> None:
            try:
                value = answer(read_json(request.body), self._hub)
            except ApiError as error:
                self._send(reply, error.status, error.value)
                return
            self._send(reply, 200, value)

        return handler

    def _health(self, request: "Request", reply: "Reply") -> None:
        del request
        status = 503 if self._engine.faults.unhealthy else 200
        reply.send(status, self._headers(None), b"")

    def _metrics(self, request: "Request", reply: "Reply") -> None:
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
