"""Going on with an answer on another rank: the request that continues after what was emitted.

Over plain OpenAI HTTP the emitted part goes back as text: behind the prompt of a completion, or as
an assistant message to be continued (vLLM: `continue_final_message`). What text cannot carry (tool
calls, reasoning, several sequences, a prompt of token ids, the state of a grammar) cannot be resumed.
Nor can a request with a member that might begin anew, as a budget for thinking does, or would take the
emitted part for the prompt's, as a truncation does: every member stands in one of the lists below.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.body import is_deep
from balanceroute.proxy.live.openai.numeric_members import integer
from balanceroute.proxy.live.openai.shape import COMPLETION_TOKENS, Api

# With the least value that an engine takes.
_LIMITS = (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0))
# They mean the same to an engine that has a part of the answer in the prompt, or are judged one by one.
# Penalties of presence and frequency do not, and such answers are continued nevertheless (see the
# documentation of the connectors).
_CARRIED = frozenset(
    {
        *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words"),
        *("cache_salt", "chat_template", "chat_template_kwargs", "continue_final_message"),
        *("documents", "echo", "frequency_penalty", "ignore_eos", "include_stop_str_in_output"),
        *("length_penalty", "logit_bias", "logprob_token_ids", "logprobs", "max_completion_tokens"),
        *("max_tokens", "media_io_kwargs", "messages", "metadata", "min_p", "min_tokens"),
        *("mm_processor_kwargs", "model", "n", "parallel_tool_calls", "presence_penalty"),
        *("priority", "prompt", "prompt_cache_key", "reasoning_effort", "repetition_penalty"),
        *("response_format", "return_mm_kwargs", "return_prompt_text", "return_token_ids"),
        *("return_token_offsets", "return_tokens_as_token_ids", "safety_identifier", "seed"),
        *("service_tier", "session_id", "skip_special_tokens", "spaces_between_special_tokens"),
        *("stop", "stop_token_ids", "store", "stream", "stream_interval", "stream_options"),
        *("temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
        *("truncation_side", "user"),
    }
)
# They say nothing if they are false or empty.
_EMPTY = frozenset({"functions", "suffix", "use_beam_search", "watermarking"})
# Characters of a member's name that the error shows.
_MAX_NAME = 64


class CannotResumeError(BalanceRouteError):
    """The answer cannot be continued from its text."""


def resumed_members(
    api: Api, values: Mapping[str, Any], text: str, emitted_tokens: int
) -> dict[str, object]:
    """Return the members of the body that change when `text` was emitted already.

    Args:
        api: The endpoint.
        values: The members of the client's body.
        text: All that was emitted, on whatever ranks.
        emitted_tokens: Its tokens.

    Raises:
        CannotResumeError: The request's form does not allow it.
    """
    _check_members(values)
    _check_freedom(values)
    for name in ("stop", "bad_words"):
        _check_beginnings(name, values.get(name), text)
    members = remaining_limits(api, values, emitted_tokens)
    if api is Api.COMPLETIONS:
        return members | _continued_prompt(values, text)
    if api is Api.CHAT:
        return members | _continued_chat(values, text)
    raise CannotResumeError("this endpoint's answers cannot be continued")


def _check_members(values: Mapping[str, Any]) -> None:
    for name in values:
        if name in _CARRIED or values[name] is None or (name in _EMPTY and not values[name]):
            continue
        if name == "include_reasoning" and values[name] is True:
            continue  # With false, reasoning is lost that nobody saw.
        raise CannotResumeError(f"its {name[:_MAX_NAME]} may mean something else then")


def _check_freedom(values: Mapping[str, Any]) -> None:
    form = values.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise CannotResumeError("an answer that follows a grammar cannot be continued")
    if values.get("tool_choice") not in (None, "none", "auto"):
        raise CannotResumeError("a call that the client demands cannot be continued")


def _check_beginnings(name: str, words: object, text: str) -> None:
    """Refuse a text at whose end one of the words may have begun: the next rank would not see it end."""
    for word in [words] if isinstance(words, str) else words if isinstance(words, list) else []:
        if not isinstance(word, str) or not word:
            continue
        tail = text[-(len(word) - 1) :] if len(word) > 1 else ""
        begin = tail.find(word[0])
        while begin >= 0:
            if word.startswith(tail[begin:]):
                raise CannotResumeError(f"one of {name} may have begun")
            begin = tail.find(word[0], begin + 1)


def remaining_limits(api: Api, values: Mapping[str, Any], emitted_tokens: int) -> dict[str, object]:
    """Return the limits of an answer of which some tokens were emitted already.

    Raises:
        CannotResumeError: One is no number.
    """
    members: dict[str, object] = {}
    for name, least in _LIMITS:
        limit = values.get(name)
        if name == "max_tokens" and name not in values and api is Api.COMPLETIONS:
            limit = COMPLETION_TOKENS
        if limit is None:
            continue
        number = integer(limit)
        if number is None:
            raise CannotResumeError(f"{name} is no integer")
        members[name] = max(least, number - emitted_tokens)
    return members


def _continued_prompt(values: Mapping[str, Any], text: str) -> dict[str, object]:
    if values.get("logprobs") is not None or values.get("return_token_ids"):
        raise CannotResumeError("its offsets or token ids would begin anew")
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise CannotResumeError("a prompt of token ids cannot be continued from text")
    if not values.get("echo"):
        return {"prompt": prompt + text}
    if not text.startswith(prompt):
        raise CannotResumeError("the echo of the prompt is not the prompt")
    return {"prompt": text, "echo": False}


def _continued_chat(values: Mapping[str, Any], text: str) -> dict[str, object]:
    messages = values.get("messages")
    if not isinstance(messages, list) or is_deep(messages):
        raise CannotResumeError("the messages cannot be continued")
    if values.get("echo"):
        raise CannotResumeError("an answer that echoes a message cannot be continued")
    if not text:
        return {}  # Nothing that can be seen: the answer begins again.
    if values.get("continue_final_message"):
        last = messages[-1] if messages else None
        if not isinstance(last, dict) or not isinstance(last.get("content"), str):
            raise CannotResumeError("the message to continue is not plain text")
        messages = [*messages[:-1], last | {"content": last["content"] + text}]
    elif values.get("add_generation_prompt") is False:
        raise CannotResumeError("the answer is no message of its own")
    else:
        messages = [*messages, {"role": "assistant", "content": text}]
    return {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
