"""Who a client is by the keys that it gives, and what it may ask for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from balanceroute.proxy.live.frontend.request_head import given_keys
from balanceroute.proxy.live.openai.routes import Media
from balanceroute.proxy.live.openai.urgency import (
    FIRST_TOKEN_DUE,
    Urgency,
    deadline_ms,
    read_level,
)
from balanceroute.proxy.live.security.credentials import Secret, Tenant, digest_of, matches_any

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission import Allowance
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.routes import Route
    from balanceroute.proxy.live.openai.shape import Api
    from balanceroute.proxy.wire.messages import Headers

EVERYBODY = Tenant("")
"""Whom clients are where there are no tenants."""

KEY_IS_GONE = (401, "Unauthorized")
"""For a request whose key was nobody's any more when its body had come."""

_NS_PER_MS = 1_000_000
_MS_PER_S = 1_000


class Clients:
    """Tells clients apart.

    Args:
        api_keys: Keys that are no tenant's own.
        tenants: Empty if there are none; then everybody with one of the keys is `everybody`.
        everybody: May what all may.
    """

    def __init__(
        self,
        api_keys: Sequence[Secret],
        tenants: Iterable[Tenant] = (),
        *,
        everybody: Tenant = EVERYBODY,
    ) -> None:
        tenants = tuple(tenants)
        self.has_keys = bool(api_keys or tenants)
        self._api_keys = api_keys
        self._owners = {digest: one for one in tenants for digest in one.digests}
        self._others = next((one for one in tenants if one.default), None)
        if not tenants:
            self._others = everybody

    def find(self, headers: "Headers") -> Tenant | None:
        """Return whose request it is that has these headers; None if nobody may send it.

        A key may be given as the bearer token, as Anthropic's X-Api-Key and as Azure's Api-Key, each
        once; those that are given must be of one tenant.
        """
        if not self.has_keys:
            return self._others
        given = given_keys(headers)
        if not given:
            return None if self._api_keys else self._others
        found, *others = [self._owner(key) for key in given]
        return found if all(one is found for one in others) else None

    def _owner(self, key: bytes) -> Tenant | None:
        if self._owners:
            owner = self._owners.get(digest_of(key))
            if owner is not None:
                return owner
        return self._others if matches_any(self._api_keys, key) else None


def refuse_model(tenant: Tenant, model: str) -> tuple[int, str] | None:
    """Return the status and the reason, in OpenAI's words, if a tenant may not use a model."""
    if not tenant.models or model in tenant.models:
        return None
    if not model:
        return 400, "you must provide a model parameter"
    return 404, f"The model `{model[:128]}` does not exist or you do not have access to it."


def refuse_route(tenant: Tenant | None, route: "Route", model: str) -> tuple[int, str] | None:
    """Return the status and the reason if a tenant may not have one engine answer a request."""
    if tenant is None:
        return KEY_IS_GONE
    if not tenant.models or route.media is Media.NONE:
        return None
    if route.media is Media.FORM:
        return 403, "the tenant's models cannot be told from others in a form"
    return refuse_model(tenant, model)


def urgency_of(
    tenant: Tenant, api: "Api", headers: "Headers", body: "RequestBody", arrived_ns: int
) -> Urgency:
    """Return how urgent a request is: by its own word where its tenant may, else by the tenant's.

    A deadline that cannot be read was refused with the head.
    """
    level, deadline_ns = tenant.level, None
    if tenant.client_priority:
        level += read_level(api, headers, body)
    if tenant.client_deadline and (ms := deadline_ms(headers, FIRST_TOKEN_DUE)) is not None:
        deadline_ns = arrived_ns + ms * _NS_PER_MS
    if deadline_ns is None and tenant.deadline_s is not None:
        deadline_ns = arrived_ns + round(tenant.deadline_s * 1e9)
    return Urgency(level, deadline_ns, tenant.weight)


def allowance_headers(allowances: "Mapping[str, Allowance]") -> "Headers":
    """Return what is left of a tenant's rates, in OpenAI's headers.

    Source: https://platform.openai.com/docs/guides/rate-limits, "Rate limits in headers".
    """
    headers: Headers = []
    for name, allowance in allowances.items():
        unit = name.encode()
        headers += [
            (b"x-ratelimit-limit-" + unit, b"%d" % allowance.limit),
            (b"x-ratelimit-remaining-" + unit, b"%d" % allowance.remaining),
            (b"x-ratelimit-reset-" + unit, duration(allowance.reset_ns)),
        ]
    return headers


def duration(time_ns: int) -> bytes:
    """Return a time as OpenAI writes it, which is as Go does: 12ms, 1s, 8.64s, 6m0s, 1h0m0s.

    In whole milliseconds, rounded up.
    """
    ms = -(-time_ns // _NS_PER_MS)
    if 0 < ms < _MS_PER_S:
        return b"%dms" % ms
    seconds, ms = divmod(ms, _MS_PER_S)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = b"%d" % seconds + ((b".%03d" % ms).rstrip(b"0") if ms else b"") + b"s"
    if hours:
        return b"%dh%dm" % (hours, minutes) + text
    return b"%dm" % minutes + text if minutes else text
