"""The routes of an engine that generate nothing."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from balanceroute.proxy.lab.emulate.api_error import invalid
from balanceroute.proxy.lab.emulate.hub import Hub
from balanceroute.proxy.lab.emulate.request import chat_text, check_model
from balanceroute.proxy.lab.emulate.sampler import prompt_digest, unit_draws
from balanceroute.proxy.lab.emulate.tokens import decode, packed, tokenise, word_of

VERSION = "0.32.0"
# No tokenizer has larger ids.
_ID_LIMIT = 1 << 63
_EMBEDDING_SIZE = 8


def answer_models(hub: Hub) -> object:
    """Return the answer of /v1/models."""
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
