"""A select service over HTTP: routers of another make ask which engine takes a request, and move its bytes themselves.

    GET    /health, /ready        need no key
    GET    /workers               the engines, one row for each server; ?model_name= of one group
    GET    /loads                 what each rank and prefiller has; likewise
    POST   /potential_loads       what each would have with a request; nothing is reserved
    POST   /overlap_scores        what each prefiller should have of a prompt in its prefix cache
    GET    /dump                  501: there is no index of KV events here that a peer could replay
    POST   /select                the engine that would be chosen now; nothing is reserved
    POST   /select_and_reserve    reserve a prefiller, or with "phase": "decode" a rank; waits until there is one
    POST   /reservations          likewise on one engine, by its worker_id or by the selection_id of a /select
    POST   /reservations/ID/prefill_complete    the prefill has ended: waits for the rank, and names it
    POST   /reservations/ID/output_block        the rank has made one more block of tokens
    DELETE /reservations/ID       the request is over; {"output_tokens"?, "failed"?: why}

Paths, members and errors are those of Dynamo's select service (its `lib/kv-router/src/services/selection`,
1.6 and later), whose members beyond these change nothing here. Two differ: an engine has one role, so a
request of both has a reservation whose prefiller is named first and whose rank by `prefill_complete`, and
workers are registered where this proxy finds its engines. The answer with a prefiller has `pull_within_s`: that
long after a caller has sent the prompt there, and no later, it may ask the rank to pull. A reservation ends with
its caller's connection while that waits, else at the latest by the time limits of its legs, see `selection`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b, sha256
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs, unquote
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta, Struct, structs

from balanceroute.proxy.core.events import Eligible, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.budgets import PrefillRequest
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Status
from balanceroute.proxy.live.frontend.groups import Group, Groups
from balanceroute.proxy.live.request.prefill_attempt import pulled_within_s
from balanceroute.proxy.live.security import Secret, bearer_token, matches_any
from balanceroute.proxy.live.selection import (
    Asked,
    Selection,
    SelectionRefusedError,
    Selector,
    endpoint_of,
)
from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Rejection, Reply, ServerLimits

MAX_BODY_BYTES = 1 << 20
"""Of a request; of a longer prompt than this holds as token ids, `isl_tokens` says as much."""
CONNECTIONS = 4096
"""At a time; each request that waits for an engine has one."""
BLOCK_TOKENS = 16
"""Tokens that one call of `output_block` counts; answers have it as `block_size`."""

_MOST_TOKENS = 1 << 24  # More than any context has.
_MOST_BLOCKS = 8192  # Whose hashes a request may have.
_MOST_ASKED = 1024  # Answers of /select that are kept for /reservations, the latest.
_KEPT_BLOCKS = 512  # Of each of them.
_MOST_NAMED = 4096
_HASH = (1 << 63) - 1
_log = logging.getLogger(__name__)
_DEFAULT = "default"  # The model and the group of a caller that names none.
_JSON: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
_OPEN = (b"/health", b"/ready")
_RESERVATIONS = b"/reservations/"
_CATALOGUE = "this proxy knows its engines by its settings, discovery or admin listener"
_NO_OVERLAP = "the prefill choice of this proxy follows no prefix caches: see --prefill-choice"
_NO_DUMP = "there is no index of KV events here that a peer could replay"
_NOT_DEVICE = (
    *("host_pinned_blocks", "disk_blocks"),
    *("host_pinned_extension_blocks", "disk_extension_blocks"),
)
_LIFECYCLES = {Status.DRAINING: "draining", Status.REMOVED: "draining"}

_Tokens = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
_Hash = Annotated[int, Meta(ge=-(1 << 63), le=_HASH)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_WorkerId = Annotated[int, Meta(ge=0, le=_HASH)]
_Text = Annotated[str, Meta(max_length=512)]
_Engine = Prefiller | Rank
_Body = TypeVar("_Body", bound=Struct)


# What callers send. Further members change nothing.


class _Prompt(Struct, frozen=True):
    """A request that is to get an engine."""

    selection_id: _Text | None = None
    reservation_id: _Text | None = None  # The same, as Dynamo 1.6 called it.
    model_name: _Text = _DEFAULT
    routing_group: _Text = _DEFAULT  # Given back, as there is one for each model.
    phase: Literal["prefill", "decode"] = "prefill"
    isl_tokens: _Tokens | None = None
    token_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    # Of each full block, with all that comes before it.
    sequence_hashes: Annotated[list[_Hash], Meta(max_length=_MOST_BLOCKS)] = []
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = BLOCK_TOKENS
    expected_output_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    session_id: _Text | None = None
    allowed_worker_ids: Annotated[list[_WorkerId], Meta(max_length=_MOST_NAMED)] | None = None
    worker_id: _WorkerId | None = None
    dp_rank: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None


class _Prefilled(Struct, frozen=True):
    isl_tokens: _Tokens | None = None  # As its engine counted them.


class _Made(Struct, frozen=True):
    decay_fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    # All that the rank has made of it, in place of one more block.
    output_tokens: Annotated[int, Meta(ge=0, le=_MOST_TOKENS)] | None = None


class _Ended(Struct, frozen=True):
    output_tokens: Annotated[int, Meta(ge=0, le=_MOST_TOKENS)] | None = None
    failed: _Text | None = None


class _RefusedError(Exception):
    """A call that gets an error answer."""

    def __init__(self, status: int, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or []


class SelectService:
    """The application and its listener.

    Args:
        unique: Returns ids for reservations whose callers name none.
        keys: One of them is to be presented, at least one.
    """

    def __init__(
        self,
        groups: Groups,
        selector: Selector,
        *,
        unique: Callable[[], str],
        keys: Sequence[Secret],
        limits: ServerLimits,
    ) -> None:
        self.keys = keys
        self._groups, self._selector, self._unique = groups, selector, unique
        self._asked: dict[str, _Prompt] = {}  # By `selection_id`, with the engine that was named.
        self._blocks: WeakKeyDictionary[Selection, int] = WeakKeyDictionary()
        self._waits: set[asyncio.Task[None]] = set()
        self.server = Server(self, limits=limits, refuse=_refusal, admit=self._admit)
        self._routes: dict[bytes, dict[bytes, Callable[[HttpRequest, Reply], None]]] = {
            b"/health": {b"GET": self._health},
            b"/ready": {b"GET": self._ready},
            b"/workers": {b"GET": self._workers},
            b"/loads": {b"GET": self._loads},
            b"/potential_loads": {b"POST": self._potential_loads},
            b"/overlap_scores": {b"POST": self._overlap_scores},
            b"/dump": {b"GET": self._dump},
            b"/select": {b"POST": self._select},
            b"/select_and_reserve": {b"POST": self._select_and_reserve},
            b"/reservations": {b"POST": self._reserve},
        }
        self._of_reservation = {
            b"": {b"DELETE": self._end},
            b"prefill_complete": {b"POST": self._prefill_complete},
            b"output_block": {b"POST": self._output_block},
        }

    async def close(self) -> None:
        for task in self._waits:
            task.cancel()
        self.server.close()
        await self.server.drain()

    def _admit(self, head: RequestHead, peer: str) -> Rejection | None:
        del peer
        if head.path in _OPEN:
            return None
        if matches_any(self.keys, bearer_token(head.headers).strip()):
            return None
        return Rejection(401, "the key is missing or wrong", ((b"www-authenticate", b"Bearer"),))

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        try:
            self._handler(request)(request, reply)
        except _RefusedError as error:
            _send_error(reply, error)
        except SelectionRefusedError as error:
            _send_error(reply, _words(error))

    def _handler(self, request: HttpRequest) -> "_Handler":
        path, why = request.path, "method not allowed"
        methods: Mapping[bytes, Callable[..., None]] | None = self._routes.get(path)
        if path.startswith(_RESERVATIONS):
            name, _, verb = path[len(_RESERVATIONS) :].partition(b"/")
            of_one = self._of_reservation.get(verb, {})
            reservation = unquote(name.decode("latin-1"))
            methods = {one: partial(work, reservation) for one, work in of_one.items()}
        elif path == b"/workers" or path.startswith(b"/workers/"):
            methods, why = methods or {b"": self._workers}, _CATALOGUE
        if not methods:
            raise _RefusedError(404, "route not found")
        handler = methods.get(b"GET" if request.method == b"HEAD" else request.method)
        if handler is None:
            raise _RefusedError(405, why, [(b"allow", b", ".join(methods))])
        return handler

    # What there is.

    def _health(self, _request: HttpRequest, reply: Reply) -> None:
        _send(reply, 200, {"status": "ok"})

    def _ready(self, _request: HttpRequest, reply: Reply) -> None:
        ready = self._groups.ready
        up = {one.target for group in self._groups for one in _engines(group) if one.open}
        _send(reply, 200 if ready else 503, {"ready": ready, "schedulable_workers": len(up)})

    def _workers(self, request: HttpRequest, reply: Reply) -> None:
        _send(reply, 200, self._catalogue(self._named(request)))

    def _loads(self, request: HttpRequest, reply: Reply) -> None:
        loads, found = self._by_engine(), []
        for group in self._named(request):
            scheduler, rows = group.intake.scheduler, []
            for engine in _engines(group):
                row = loads[group.name, engine.target.role.value, engine.name]
                tokens = row["kv_tokens"]
                load = _load(engine, row, tokens, tokens // BLOCK_TOKENS)
                rows.append({**load, "kv_tokens": tokens})
            waiting = scheduler.prefill_queue.waiting + len(scheduler.pool.entries)
            found.append({**_names(group), "loads": rows, "pending_count": waiting})
        _send(reply, 200, found)

    def _potential_loads(self, request: HttpRequest, reply: Reply) -> None:
        asked = _read(request, _PROMPT)
        group, tokens, loads = self._group(asked.model_name), _tokens(asked), self._by_engine()
        cached = self._cached(group, asked) or {}
        rows = []
        for engine in _engines(group):
            row = loads[group.name, engine.target.role.value, engine.name]
            then = row["kv_tokens"] + tokens
            if isinstance(engine, Prefiller):
                then -= cached.get(engine.id, 0)
            rows.append(_load(engine, row, then, -(-then // BLOCK_TOKENS)))
        _send(reply, 200, rows)

    def _overlap_scores(self, request: HttpRequest, reply: Reply) -> None:
        asked = _read(request, _PROMPT)
        group, size = self._group(asked.model_name), asked.block_size
        hashes = len(asked.sequence_hashes)
        if not hashes:
            raise _RefusedError(400, "sequence_hashes are required: prompts are known by them here")
        # Of a prompt without a length, each block that is named is full.
        asked = structs.replace(
            asked, token_ids=None, isl_tokens=asked.isl_tokens or hashes * size + 1
        )
        cached = self._cached(group, asked)
        if cached is None:
            raise _RefusedError(501, _NO_OVERLAP)
        rows = [
            {
                "worker_id": worker_id(engine),
                "dp_rank": dp_rank(engine),
                "device_blocks": cached[engine.id] // size,
                **dict.fromkeys(_NOT_DEVICE, 0),
                "shared_beyond_device_blocks": None,
                "router_credit_blocks": cached[engine.id] / size,
            }
            for engine in group.intake.instances.prefillers
            if engine.open
        ]
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        body = {"block_size": size, "num_blocks": hashes, "workers": rows, "shared_cache": shared}
        _send(reply, 200, body)

    def _cached(self, group: Group, asked: _Prompt) -> dict[PrefillerId, int] | None:
        """Return what each prefiller should have of a prompt; None if the proxy does not follow that."""
        tokens, blocks = _tokens(asked), _blocks(asked)
        ticket = Ticket(tokens, blocks=blocks, block_tokens=float(asked.block_size))
        now_ns = round(self._groups.context.clock() * 1e9)
        prefillers = group.intake.scheduler.prefillers
        return prefillers.cached_tokens(PrefillRequest(RequestId(0), ticket, tokens, now_ns))

    def _dump(self, _request: HttpRequest, _reply: Reply) -> None:
        raise _RefusedError(501, _NO_DUMP)

    def _by_engine(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        rows: list[dict[str, Any]] = self._selector.loads()
        return {(row["group"], row["role"], row["engine"]): row for row in rows}

    def _named(self, request: HttpRequest) -> list[Group]:
        try:
            asked = parse_qs(request.query.decode("latin-1"), max_num_fields=8)
        except ValueError as error:
            raise _RefusedError(400, f"the query: {error}") from None
        names = asked.get("model_name", [])
        found = {group.name: group for group in map(self._group, names)} if names else {}
        return list(found.values()) or list(self._groups)

    def _group(self, model: str) -> Group:
        found = self._groups.find("" if model == _DEFAULT else model)
        if found is None:
            raise _RefusedError(404, f"there is no model {model[:128]!r}")
        return found

    def _catalogue(self, groups: Collection[Group] | Groups) -> list[dict[str, object]]:
        found: dict[tuple[str, int], dict[str, object]] = {}
        for group in groups:
            for engine in _engines(group):
                number, rank = worker_id(engine), dp_rank(engine)
                row = found.setdefault(
                    (group.name, number),
                    {
                        "worker_id": number,
                        **_names(group),
                        "lifecycle": "unschedulable",
                        "role": engine.target.role.value,
                        "endpoint": f"http://{endpoint_of(engine)}",
                        "block_size": BLOCK_TOKENS,
                        "data_parallel_start_rank": rank,
                        "data_parallel_size": 0,
                    },
                )
                row["data_parallel_size"] = int(str(row["data_parallel_size"])) + 1
                if engine.open:
                    row["lifecycle"] = "schedulable"
                elif row["lifecycle"] != "schedulable":
                    row["lifecycle"] = _LIFECYCLES.get(engine.status, "unschedulable")
        return list(found.values())

    # What is chosen.

    def _select(self, request: HttpRequest, reply: Reply) -> None:
        asked = _read(request, _PROMPT)
        group = self._group(asked.model_name)
        tokens = _tokens(asked)
        loads = self._by_engine()
        allowed = self._eligible(group, asked)
        found: list[_Engine] = [
            engine
            for engine in _engines(group)
            if engine.open
            and isinstance(engine, Rank) == (asked.phase == "decode")
            and (allowed is None or engine.id in _ids(allowed, engine))
        ]
        if not found:
            raise _RefusedError(503, f"no worker of the phase {asked.phase} is schedulable")
        role = found[0].target.role.value
        least = min(found, key=lambda one: loads[group.name, role, one.name]["kv_tokens"])
        number, rank = worker_id(least), dp_rank(least)
        name = asked.selection_id or asked.reservation_id
        if name is not None:
            self._asked[name] = structs.replace(
                asked,
                worker_id=number,
                dp_rank=rank,
                token_ids=None,
                isl_tokens=tokens,
                sequence_hashes=asked.sequence_hashes[:_KEPT_BLOCKS],
            )
            if len(self._asked) > _MOST_ASKED:
                del self._asked[next(iter(self._asked))]
        _send(reply, 200, _choice(name, asked, least) | {"effective_prefill_tokens": tokens})

    def _select_and_reserve(self, request: HttpRequest, reply: Reply) -> None:
        self._begin(structs.replace(_read(request, _PROMPT), worker_id=None), reply, 200)

    def _reserve(self, request: HttpRequest, reply: Reply) -> None:
        asked = _read(request, _PROMPT)
        if asked.worker_id is None:
            name = asked.selection_id or asked.reservation_id or ""
            kept = self._asked.get(name)
            if kept is None:
                raise _RefusedError(404, f"there is no selection {name[:128]!r}, and no worker_id")
            asked = kept
        self._begin(asked, reply, 201)

    def _begin(self, asked: _Prompt, reply: Reply, status: int) -> None:
        group, tokens = self._group(asked.model_name), _tokens(asked)
        name = asked.selection_id or asked.reservation_id or self._unique()
        eligible, decodes = self._eligible(group, asked), asked.phase == "decode"
        if asked.worker_id is not None:
            named = self._worker(group, asked)
            decodes = isinstance(named[0], Rank)
            eligible = _only(group, named)
        blocks = _blocks(asked)
        session = "" if asked.session_id is None else asked.session_id
        found = self._selector.select(
            Asked(
                name,
                tokens,
                "" if asked.model_name == _DEFAULT else asked.model_name,
                max_tokens=asked.max_tokens,
                expected_tokens=asked.expected_output_tokens,
                prefilled=decodes,
                eligible=eligible,
                session=_number(session),
                blocks=blocks,
                block_tokens=float(asked.block_size) if blocks else 0.0,
            )
        )

        async def choose() -> None:
            engine = None if decodes else await found.prefiller()
            row = _choice(name, asked, engine or await found.rank())
            self._asked.pop(name, None)  # Until then a refused caller may ask again.
            within_s = pulled_within_s(group.intake.context.legs)
            if engine is not None and within_s is not None:
                row["pull_within_s"] = within_s
            _send(reply, status, row | {"effective_prefill_tokens": 0 if decodes else tokens})

        self._wait(found, reply, choose())

    def _wait(self, found: Selection, reply: Reply, work: Coroutine[None, None, None]) -> None:
        """Do what answers once there is an engine; give the request up if its caller hangs up before."""

        async def answer() -> None:
            try:
                await work
            except SelectionRefusedError as error:
                _send_error(reply, _words(error))
            except Exception:
                _log.exception("select service: a call failed")
                _send_error(reply, _RefusedError(500, "internal error; the log says more"))
            finally:
                reply.on_closed = None

        def caller_left() -> None:
            found.cancel()

        reply.on_closed = caller_left
        task = asyncio.get_running_loop().create_task(answer())
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    # What becomes of it.

    def _find(self, name: str) -> Selection:
        found = self._selector.find(name)
        if found is None:
            raise _RefusedError(404, f"there is no reservation {name[:128]!r}")
        return found

    def _prefill_complete(self, name: str, request: HttpRequest, reply: Reply) -> None:
        body = _read(request, _PREFILLED, may_be_empty=True)
        found = self._find(name)
        found.prefilled(body.isl_tokens)

        async def choose() -> None:
            rank = await found.rank()
            _send(reply, 200, {"status": "ok", "selection_id": name, **_place(rank)})

        self._wait(found, reply, choose())

    def _output_block(self, name: str, request: HttpRequest, reply: Reply) -> None:
        body = _read(request, _MADE, may_be_empty=True)
        found = self._find(name)
        tokens = body.output_tokens
        if tokens is None:
            tokens = (self._blocks.get(found, 0) + 1) * BLOCK_TOKENS
        if not found.emitted(tokens):
            raise _RefusedError(409, f"no rank has the reservation {name[:128]!r} yet")
        self._blocks[found] = tokens // BLOCK_TOKENS
        _send(reply, 200, {"status": "ok"})

    def _end(self, name: str, request: HttpRequest, reply: Reply) -> None:
        body = _read(request, _ENDED, may_be_empty=True)
        found = self._find(name)
        if body.failed is None:
            found.ended(body.output_tokens)
        else:
            found.failed(body.failed)
        _send(reply, 200, {"status": "ok"})

    # Engines by what callers call them.

    def _worker(self, group: Group, asked: _Prompt) -> list[_Engine]:
        """Return the engines of a worker, or its one rank that is named."""
        found = [one for one in _engines(group) if worker_id(one) == asked.worker_id]
        if not found:
            raise _RefusedError(404, f"there is no worker {asked.worker_id}")
        ranks = [one for one in found if asked.dp_rank in (None, dp_rank(one))]
        if not ranks:
            raise _RefusedError(404, f"worker {asked.worker_id} has no rank {asked.dp_rank}")
        return ranks

    def _eligible(self, group: Group, asked: _Prompt) -> Eligible | None:
        """Return the engines that a request may have; None for all. A role of which none is named has all."""
        if asked.allowed_worker_ids is None:
            return None
        allowed = set(asked.allowed_worker_ids)
        if not allowed:
            raise _RefusedError(503, "no worker is allowed: allowed_worker_ids is empty")
        known = {worker_id(one) for one in _engines(group)}
        if strange := sorted(allowed - known):
            raise _RefusedError(404, f"there is no worker {strange[0]}")
        return _only(group, [one for one in _engines(group) if worker_id(one) in allowed])


_Handler = Callable[[HttpRequest, Reply], None]
_PROMPT = msgspec.json.Decoder(_Prompt)
_PREFILLED = msgspec.json.Decoder(_Prefilled)
_MADE = msgspec.json.Decoder(_Made)
_ENDED = msgspec.json.Decoder(_Ended)


def worker_id(engine: _Engine) -> int:
    """Return the number of an engine's server, which stays over restarts."""
    name = f"{engine.target.role.value} {engine.target.url}"
    return int.from_bytes(sha256(name.encode()).digest()[:6])


def dp_rank(engine: _Engine) -> int:
    header = engine.header if isinstance(engine, Rank) else None
    return int(header) if header is not None and header.isdigit() else 0


def _engines(group: Group) -> Iterator[_Engine]:
    yield from group.intake.instances.prefillers
    yield from group.intake.instances.ranks


def _only(group: Group, engines: Collection[_Engine]) -> Eligible:
    instances = group.intake.instances
    prefillers = {one.id for one in engines if isinstance(one, Prefiller)}
    ranks = {one.id for one in engines if isinstance(one, Rank)}
    return Eligible(
        frozenset(prefillers or {one.id for one in instances.prefillers}),
        frozenset(ranks or {one.id for one in instances.ranks}),
    )


def _ids(eligible: Eligible, engine: _Engine) -> Collection[int]:
    return eligible.ranks if isinstance(engine, Rank) else eligible.prefillers


def _names(group: Group) -> dict[str, object]:
    return {"model_name": group.model or _DEFAULT, "routing_group": _DEFAULT}


def _place(engine: _Engine) -> dict[str, object]:
    return {
        "worker_id": worker_id(engine),
        "dp_rank": dp_rank(engine),
        "endpoint": f"http://{endpoint_of(engine)}",
        "role": engine.target.role.value,
        "block_size": BLOCK_TOKENS,
    }


def _load(engine: _Engine, row: Mapping[str, Any], tokens: int, blocks: int) -> dict[str, object]:
    is_rank = isinstance(engine, Rank)
    return {
        "worker_id": worker_id(engine),
        "dp_rank": dp_rank(engine),
        "role": row["role"],
        "potential_prefill_tokens": 0 if is_rank else tokens,
        "potential_decode_blocks": blocks if is_rank else 0,
        "active_requests": row["requests"],
    }


def _choice(name: str | None, asked: _Prompt, engine: _Engine) -> dict[str, object]:
    ids = {} if name is None else {"selection_id": name, "reservation_id": name}
    names = {"model_name": asked.model_name, "routing_group": asked.routing_group}
    return {**ids, **names, **_place(engine)}


def _tokens(asked: _Prompt) -> int:
    if asked.token_ids is not None:
        return len(asked.token_ids)
    if asked.isl_tokens is None:
        raise _RefusedError(400, "isl_tokens is required without token_ids")
    return asked.isl_tokens


def _blocks(asked: _Prompt) -> tuple[int, ...]:
    """Return the hashes of a prompt's full blocks, as tickets have them."""
    most = _tokens(asked) // asked.block_size
    return tuple(one & _HASH for one in asked.sequence_hashes[:most])


def _number(session: str) -> int:
    """Return a conversation as tickets name it; 0 for none."""
    if not session:
        return 0
    return int.from_bytes(blake2b(session.encode(), digest_size=8).digest()) & _HASH or 1


def _read(
    request: HttpRequest, decoder: "msgspec.json.Decoder[_Body]", *, may_be_empty: bool = False
) -> _Body:
    """Return the body of a request; an error names the place that is wrong."""
    try:
        return decoder.decode(request.body or (b"{}" if may_be_empty else b""))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _RefusedError(400, f"the body: {error}") from None


def _words(error: SelectionRefusedError) -> _RefusedError:
    """Return a refusal in the words of this interface."""
    if error.status == 499:
        return _RefusedError(409, "the reservation was ended meanwhile")
    message = str(msgspec.json.decode(error.body)["error"]["message"])
    return _RefusedError(error.status, message, list(error.headers))


def _send(reply: Reply, status: int, what: object) -> None:
    reply.send(status, list(_JSON), msgspec.json.encode(what))


def _send_error(reply: Reply, error: _RefusedError) -> None:
    given = [one for one in error.headers if one[0] not in (b"content-type", b"cache-control")]
    reply.send(error.status, [*_JSON, *given], msgspec.json.encode({"error": error.message}))


def _refusal(rejection: Rejection, head: RequestHead | None, peer: str) -> tuple[Headers, bytes]:
    del head, peer
    return [*_JSON, *rejection.headers], msgspec.json.encode({"error": rejection.message})
