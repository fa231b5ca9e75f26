"""Going on with an answer on another rank: the request that continues after what was emitted.

Over plain OpenAI HTTP the emitted part goes back as text: behind the prompt of a completion, or as
an assistant message to be continued (vLLM: `continue_final_message`). What text cannot carry (tool
calls, reasoning, several sequences, a prompt of token ids, the state of a grammar) cannot be resumed.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.body import is_deep
from balanceroute.proxy.live.openai.numeric_members import integer
from balanceroute.proxy.live.openai.shape import COMPLETION_TOKENS, Api

# With the least value that an engine takes.
_LIMITS = (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0))
# The engine would begin such an answer again from its first token.
_GRAMMARS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


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
    _check_freedom(values)
    _check_stops(values.get("stop"), text)
    members = remaining_limits(api, values, emitted_tokens)
    if api is Api.COMPLETIONS:
        return members | _continued_prompt(values, text)
    if api is Api.CHAT:
        return members | _continued_chat(values, text)
    raise CannotResumeError("this endpoint's answers cannot be continued")


def _check_freedom(values: Mapping[str, Any]) -> None:
    form = values.get("response_format")
    free = form is None or (isinstance(form, dict) and form.get("type") == "text")
    if not free or any(values.get(name) is not None for name in _GRAMMARS):
        raise CannotResumeError("an answer that follows a grammar cannot be continued")
    if values.get("tool_choice") not in (None, "none", "auto"):
        raise CannotResumeError("a call that the client demands cannot be continued")


def _check_stops(stops: object, text: str) -> None:
    """Refuse a text at whose end a stop string may have begun: the next rank would not see it end."""
    for stop in [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []:
        if not isinstance(stop, str) or not stop:
            continue
        tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
        begin = tail.find(stop[0])
        while begin >= 0:
            if stop.startswith(tail[begin:]):
                raise CannotResumeError("a stop string may have begun")
            begin = tail.find(stop[0], begin + 1)


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
