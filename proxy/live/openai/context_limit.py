"""Requests that no engine's context can hold, refused before a prefill is spent on them.

The prefill leg asks for one token, so an answer that is too long would be found out by the decode rank,
with the KV cache already on a prefiller. Only what is certain is refused, in the words of vLLM 0.32
(`TokenizeParams`); everything else is for the engines to judge.
"""

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.numeric_members import integer
from balanceroute.proxy.live.openai.shape import Api

# Up to Python 3.11 each look at a member of an enumeration is a call.
_CHAT, _COMPLETIONS = Api.CHAT, Api.COMPLETIONS


def refuse_if_too_long(api: Api, body: RequestBody, max_model_len: int) -> None:
    """Refuse a request whose answer, or whose prompt of token ids, exceeds the context by itself.

    Args:
        api: The endpoint; only chats and completions are judged.
        body: The client's.
        max_model_len: A context that no engine exceeds.

    Raises:
        BodyError: It does.
    """
    if api not in (_CHAT, _COMPLETIONS):
        return
    values = body.values
    name = "max_tokens"
    if api is _CHAT and values.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    limit = integer(values.get(name))
    if limit is not None and limit > max_model_len:
        raise BodyError(
            f"{name}={limit} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter={name}, value={limit})",
            name,
        )
    if api is _CHAT or values.get("truncate_prompt_tokens") is not None:
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
