"""The JSON of administrators' orders."""

import json
from collections.abc import Mapping

from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.settings.checks import event_address
from balanceroute.proxy.wire.messages import Headers, HttpRequest

MAX_TEXT = 2048
MAX_WAIT_S = 86_400.0


class OrderRefusal(Exception):  # noqa: N818
    """A request that gets an error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or []


def read_order(
    request: HttpRequest,
    *,
    required: set[str],
    optional: frozenset[str] | set[str] | None = frozenset(),
) -> dict[str, object]:
    """Return the body of an order.

    Raises:
        Refusal: It is not a JSON object with the required keys, and only optional ones beside them, which
            are all where `optional` is None.
    """
    try:
        order = json.loads(request.body, object_pairs_hook=_without_duplicates)
    # RecursionError: nesting too deep for the decoder. UnicodeDecodeError is a ValueError.
    except (ValueError, RecursionError) as error:
        raise OrderRefusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(order, dict):
        raise OrderRefusal(400, "the body must be a JSON object")
    for key in sorted(required - order.keys()):
        raise OrderRefusal(400, f"{key} is missing", param=key)
    for key in [] if optional is None else sorted(order.keys() - required - optional):
        raise OrderRefusal(400, f"unknown key {key[:64]!r}")
    return order


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice")
    return result


def instance_of(order: dict[str, object]) -> tuple[Role, str]:
    """Return the role and the address that an order names. Raises Refusal: it names none."""
    role, url = text_of(order, "role"), address_of(order, "url")
    try:
        return Role(role), url
    except ValueError:
        roles = " or ".join(role.value for role in Role)
        raise OrderRefusal(400, f"role must be {roles}", param="role") from None


def seconds_of(order: Mapping[str, object], name: str) -> float | None:
    """Return a time of an order; None if it names none. Raises Refusal: it is none."""
    if name not in order:
        return None
    value = order[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= MAX_WAIT_S
    ):
        raise OrderRefusal(400, f"{name} must be from 0 to {MAX_WAIT_S:g}", param=name)
    return value


def force_of(order: Mapping[str, object]) -> bool:
    """Return whether an order holds although requests are in flight. Raises Refusal: it is no flag."""
    force = order.get("force", False)
    if not isinstance(force, bool):
        raise OrderRefusal(400, "force must be true or false", param="force")
    return force


def group_of(order: dict[str, object]) -> str | None:
    """Return the group that an order names; None if it names none. Raises Refusal: it is no text."""
    return text_of(order, "group") if "group" in order else None


def address_of(order: dict[str, object], key: str) -> str:
    """Return the address of an engine that an order has. Raises Refusal: it is none."""
    text = text_of(order, key)
    try:
        EngineUrl.parse(text)
    except ConfigError as error:
        raise OrderRefusal(400, f"{key} {error}", param=key) from None
    return text


def event_addresses_of(order: dict[str, object]) -> tuple[str | None, str | None]:
    """Return where a prefiller publishes its KV cache events and sends them again; None for what is not named.

    Raises:
        Refusal: One is no address, or only the second is named.
    """
    events, replay = (_event_address_of(order, key) for key in ("kv_events", "kv_replay"))
    if replay is not None and events is None:
        raise OrderRefusal(400, "kv_replay: needs kv_events too", param="kv_replay")
    return events, replay


def _event_address_of(order: dict[str, object], key: str) -> str | None:
    if key not in order:
        return None
    try:
        return event_address(text_of(order, key))
    except ConfigError as error:
        raise OrderRefusal(400, f"{key} {error}", param=key) from None


def text_of(order: dict[str, object], key: str) -> str:
    """Return a text that an order has. Raises Refusal: it is none."""
    value = order[key]
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise OrderRefusal(400, f"{key} must be a text of 1 to {MAX_TEXT} characters", param=key)
    return value


class UnknownInstanceError(BalanceRouteError):
    """An order about an instance that is not there."""


class ConflictError(BalanceRouteError):
    """An order that the present state does not allow."""
