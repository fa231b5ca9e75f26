"""The pages about models that the proxy answers itself."""

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from balanceroute.proxy.live.frontend.clients import refuse_model
from balanceroute.proxy.wire.messages import Rejection

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from balanceroute.proxy.live.frontend.groups import Groups
    from balanceroute.proxy.live.security.credentials import Tenant

MODELS = b"/v1/models"
"""The path of the list; those of single models are below it."""

_MODEL = b"/v1/models/"


def is_of_models(path: bytes) -> bool:
    """Return whether a page is one of these."""
    return path == MODELS or path.startswith(_MODEL)


def model_page(
    path: bytes, groups: "Groups", aliases: "Collection[str]", tenant: "Tenant"
) -> bytes | Rejection:
    """Return the list of the models that a tenant may use, or what it tells of one of them.

    The latter is what an engine's list tells; vLLM has no such route.
    """
    if path == MODELS:
        cards = [*map(_card, aliases), *(one for group in groups for one in group.cards())]
        allowed = [one for one in cards if refuse_model(tenant, one["id"]) is None]
        return _dump({"object": "list", "data": allowed})
    name = unquote_to_bytes(path.removeprefix(_MODEL)).decode("utf-8", "replace")
    if name in aliases and refuse_model(tenant, name) is None:
        return _dump(_card(name))
    group = groups.find(name)
    model = None if group is None else group.served.find(name)
    if model is None or refuse_model(tenant, name) is not None:
        return Rejection(404, f"The model `{name[:128]}` does not exist.", param="model")
    return _dump(model.card)


def _card(alias: str) -> "Mapping[str, Any]":
    """Return the entry of an alias."""
    return {"id": alias, "object": "model", "created": 0, "owned_by": "balanceroute"}


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
