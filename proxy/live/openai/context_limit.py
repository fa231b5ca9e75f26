"""Requests that no engine's context can hold, refused before a prefill is spent on them.

The prefill leg asks for one token, so an answer that is too long would be found out by the decode rank,
with the KV cache already on a prefiller. Of a prompt of token ids that is known before, of a text once a
prefiller has counted it. Only what is certain is refused, in the words of vLLM 0.32 (`TokenizeParams`);
everything else is for the engines to judge.
"""

from typing import Any

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.numeric_members import integer
from balanceroute.proxy.live.openai.shape import LIMIT_MEMBER, Api

# Up to Python 3.11 each look at a member of an enumeration is a call.
_CHAT, _COMPLETIONS, _MESSAGES = Api.CHAT, Api.COMPLETIONS, Api.MESSAGES


def refuse_if_too_long(api: Api, body: RequestBody, max_model_len: int) -> None:
    """Refuse a request whose answer, prompt of token ids, or both together exceed the context.

    Args:
        api: The endpoint; of agents' requests only the limit is judged, and no prompt of token ids.
        body: The client's.
        max_model_len: A context that no engine exceeds.

    Raises:
        BodyError: They do.
    """
    if api not in LIMIT_MEMBER:
        return
    values = body.values
    name, limit = _limit(api, body)
    if limit is not None and limit > max_model_len:
        raise BodyError(
            f"{name}={limit} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter={name}, value={limit})",
            name,
        )
    if api is not _COMPLETIONS or values.get("truncate_prompt_tokens") is not None:
        return
    prompt = body.summary("prompt")
    if prompt.integers == prompt.elements > max_model_len:
        least = "at least " if prompt.elements == max_model_len + 1 else ""
        raise BodyError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {least}{prompt.elements} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={prompt.elements})",
            "input_tokens",
        )
    if limit is not None and prompt.integers == prompt.elements > max_model_len - limit:
        raise _too_long(prompt.elements, limit, max_model_len)


def refuse_what_was_counted(
    api: Api, body: RequestBody, prompt_tokens: int, max_model_len: int
) -> None:
    """Refuse a request whose prompt and answer exceed the context together, once they are counted.

    Args:
        api: The endpoint; only chats and completions are judged.
        body: The client's.
        prompt_tokens: Of the prompt, as an engine counted them.
        max_model_len: A context that no engine exceeds.

    Raises:
        BodyError: They do. What only an engine knows is left to it: it cuts a prompt, and judges images
            by their places in the text and not by the tokens that they become.
    """
    if api not in (_CHAT, _COMPLETIONS):
        return
    _, limit = _limit(api, body)
    if limit is None or limit < 1 or prompt_tokens + limit <= max_model_len:
        return
    if body.values.get("truncate_prompt_tokens") is None and _is_text(api, body):
        # An engine's tokeniser reads no further than to the first token too many.
        raise _too_long(max_model_len - limit + 1, limit, max_model_len)


def _limit(api: Api, body: RequestBody) -> tuple[str, int | None]:
    """Return the member that limits the answer, and the limit that it is taken for."""
    name = LIMIT_MEMBER[api]
    if api is _CHAT and body.values.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    limit = integer(body.values.get(name))
    # vLLM makes a chat of a message, with both limits.
    return ("max_completion_tokens" if api is _MESSAGES else name), limit


def _is_text(api: Api, body: RequestBody) -> bool:
    """Return whether a prompt is nothing but text, or ids; to read all of it is expensive."""
    if api is _COMPLETIONS:
        return True
    messages = body.large_values().get("messages")
    return isinstance(messages, list) and all(map(_says_text, messages))


def _says_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        for part in content
    )


def _too_long(prompt_tokens: int, limit: int, max_model_len: int) -> BodyError:
    least = "at least " if prompt_tokens + limit == max_model_len + 1 else ""
    return BodyError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} "
        f"output tokens and your prompt contains {least}{prompt_tokens} input tokens, for a total of "
        f"{least}{prompt_tokens + limit} tokens. Please reduce the length of the input prompt or the "
        f"number of requested output tokens. (parameter=input_tokens, value={prompt_tokens})",
        "input_tokens",
    )
