"""The public routes: which part serves each, and why some are not served.

vLLM 0.32's routes (its `entrypoints`) and the proxy's own. Paths match exactly, except for one slash at
the end (some clients put one behind their base URL) and for the last part of those that name a resource,
so that no path reaches an engine by accident. scripts/reproduce reference
makes docs/appendix/routes.md of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Handling(Enum):
    """The part that answers a route."""

    GENERATION = "prefill and decode legs"
    SINGLE_ENGINE = "a prefiller, unchanged"
    OWN = "the proxy"
    CONTROL = "the proxy, for the administrators' token, with `--control-on-api-port`; else 404"
    NOT_SERVED = "404"  # vLLM has the route, and the proxy says why it has not.


GENERATION, OWN = Handling.GENERATION, Handling.OWN


class Media(Enum):
    """The kind of body of a route's requests."""

    NONE = ""
    JSON = "application/json"
    FORM = "multipart/form-data"


JSON, FORM = Media.JSON, Media.FORM


@dataclass(frozen=True, slots=True)
class Route:
    """One route."""

    path: str  # With `{id}` where the name of a resource stands, which may hold slashes.
    methods: tuple[bytes, ...]
    handling: Handling
    media: Media = Media.NONE  # Of the request's body.
    keyed: bool = True  # Whether it needs an API key where the proxy has any.
    # Whether the single engine that answers it generates text as it does for a completion, so that
    # members which steer KV transfer must not reach it.
    generates: bool = False
    reason: str = ""  # Why it is not served; empty if it is.
    # What to do instead of asking for it by WebSocket; empty if no API has it so.
    websocket: str = ""

    @property
    def allow(self) -> bytes:
        """The value of an Allow header."""
        return b", ".join(self.methods)


_GET = (b"GET", b"HEAD")
_POST = (b"POST",)
_NOT_KEPT = (
    "responses are not kept: with several engines none of them has what another one answered. "
    "Send the whole conversation in `input`"
)
_WITHOUT_WEBSOCKET = {"/v1/responses": "POST the same request, with `stream` for its events"}
_OPERATORS = "only operators change engines: ask each engine itself"


def _single(*paths: str, generates: bool = False) -> Iterable[Route]:
    for path in paths:
        yield Route(path, _POST, Handling.SINGLE_ENGINE, Media.JSON, generates=generates)


def _own(*paths: str, keyed: bool = False) -> Iterable[Route]:
    for path in paths:
        yield Route(path, _GET, Handling.OWN, keyed=keyed)


def _not_served(reason: str, *paths: str) -> Iterable[Route]:
    for path in paths:
        yield Route(path, (), Handling.NOT_SERVED, keyed=False, reason=reason)


FANNED_OUT = (
    # Of vLLM 0.32.
    *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/shutdown_weight_transfer_engine", "/weight_checker", "/collective_rpc"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    # Of SGLang, and of servers that training frameworks make of vLLM.
    *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_disk"),
    *(
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
    ),
)
"""Orders of administrators that every engine gets as they are."""

ROUTES: tuple[Route, ...] = (
    *(
        Route(
            path,
            _POST,
            Handling.GENERATION,
            Media.JSON,
            websocket=_WITHOUT_WEBSOCKET.get(path, ""),
        )
        for path in (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            # vLLM serves it with --enable-scale-out, else says 403.
            "/inference/v1/generate",
        )
    ),
    *_single("/v1/chat/completions/batch", generates=True),
    *_single("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *_single("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring"),
    *_single("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    *_single("/v1/decisions", "/v1/systemone"),  # The first one is of vLLM 0.33.
    *_single("/v1/chat/completions/render", "/v1/completions/render"),
    *_single("/v1/messages/render", "/v1/responses/render"),
    *_single("/v1/chat/completions/derender", "/v1/completions/derender"),
    *(
        Route(path, _POST, Handling.SINGLE_ENGINE, Media.FORM)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations")
    ),
    *(Route(path, _GET, Handling.SINGLE_ENGINE) for path in ("/v1/models", "/tokenizer_info")),
    *_own("/health", "/liveness", "/ready", "/readiness", "/healthcheck", "/version"),
    # It names engines, models and loads.
    *_own("/metrics", keyed=True),
    Route("/ping", (*_GET, b"POST"), Handling.OWN, keyed=False),
    *_own("/load", "/v1/models/{id}", keyed=True),
    *_not_served(_NOT_KEPT, "/v1/responses/{id}", "/v1/responses/{id}/cancel"),
    Route(
        "/v1/realtime",
        (),
        Handling.NOT_SERVED,
        keyed=False,
        reason="WebSockets are not served",
        websocket="POST audio to /v1/audio/transcriptions, or text to /v1/chat/completions",
    ),
    *_not_served("call the API that is meant, such as /v1/chat/completions", "/invocations"),
    *_not_served(
        _OPERATORS,
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/server_info",
        "/inference/v1/abort_requests",
        "/abort_requests",
    ),
)
"""All routes, in the order of docs/appendix/routes.md."""

CONTROL: tuple[Route, ...] = tuple(
    Route(path, methods, Handling.CONTROL)
    for methods, paths in (
        ((*_GET, b"POST"), ("/workers",)),
        ((*_GET, b"DELETE"), ("/workers/{id}",)),
        (_GET, ("/list_workers", "/is_paused", "/is_sleeping")),
        (_POST, ("/add_worker", "/remove_worker")),
        (_POST, ("/pause", "/resume", "/abort_requests", "/sleep", "/wake_up")),
        (_POST, ("/flush_cache", *FANNED_OUT)),
    )
    for path in paths
)
"""Routes of the admin listener that the clients' port may serve too. No engine has them: so not among `ROUTES`."""

LIVE = (b"/health", b"/liveness", b"/ping")
# The last one is what vLLM's own disaggregation proxies have.
READY = (b"/ready", b"/readiness", b"/healthcheck")
METRICS = b"/metrics"

_EXACT = {route.path.encode(): route for route in ROUTES if "{id}" not in route.path}
# The longest first: it is the closest match.
_NAMED = [
    (route.path.encode().partition(b"{id}"), route)
    for route in sorted(ROUTES, key=lambda route: -len(route.path))
    if "{id}" in route.path
]


def exact_path(path: bytes) -> bytes:
    """Return a path as its route has it: without the slash at its end that is not the route's."""
    return path[:-1] if path[-1:] == b"/" and path[:-1] in _EXACT else path


def find(path: bytes) -> Route | None:
    """Return the route of a path, None if there is none."""
    route = _EXACT.get(exact_path(path))
    if route is not None:
        return route
    for (begin, _, end), named in _NAMED:
        if len(path) > len(begin) + len(end) and path.startswith(begin) and path.endswith(end):
            return named
    return None
