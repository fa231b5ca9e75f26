"""Going on with an answer on another rank, from the ids of its tokens.

The prompt of the request that continues is the ids of the first one's prompt and of the answer so far.
`/v1/completions` alone takes ids, so a chat goes on there, and its events are written as a chat's
(`continuation_stream.py`). Only what is known to mean the same there is continued: every member of the
body stands in one of the lists below.

Not continued is what begins anew with each request in vLLM: grammars, penalties that count the output,
parsers of tool calls and reasoning. Echoes and a client's own wish for ids would have to be put together.
Stop strings begin anew, too, and are continued where what an engine says again is the same
(`backed_up_ids.py`). An answer that is token ids goes on at its own endpoint (`token_continuation.py`).
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.body import BodyError, dump
from balanceroute.proxy.live.openai.numeric_members import integer
from balanceroute.proxy.live.openai.resume import remaining_limits
from balanceroute.proxy.live.openai.shape import CALLED_BY_ENGINES, Api, Shape
from balanceroute.proxy.live.openai.token_continuation import (
    continuable_tokens,
    continued_tokens_body,
)
from balanceroute.proxy.live.openai.token_shape import SAMPLING

_CONTINUED_AT = {
    Api.CHAT: Api.COMPLETIONS,
    Api.COMPLETIONS: Api.COMPLETIONS,
    Api.GENERATE: Api.GENERATE,
}
# What vLLM's `SamplingParams` takes for no seed.
_NO_SEEDS = (None, -1)
# Those whose requests have a seed.
_SEEDED = frozenset({Api.CHAT, Api.COMPLETIONS, Api.GENERATE, Api.RESPONSES})
# As vLLM's `SamplingParams`: below, the most likely token is taken.
_GREEDY_BELOW = 1e-5
# The other legs' body has these as they are.
_KEPT = frozenset(
    {
        *("allowed_token_ids", "cache_salt", "ignore_eos", "include_stop_str_in_output"),
        *("logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "min_p", "min_tokens"),
        *("model", "n", "priority", "repetition_penalty", "seed", "skip_special_tokens"),
        *("spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_options"),
        *("temperature", "top_k", "top_logprobs", "top_p", "user"),
    }
)
# What they say is in the ids of the prompt, or says nothing to the engine.
_SPENT = frozenset(
    {
        *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "documents", "messages", "metadata", "parallel_tool_calls"),
        *("prompt", "prompt_cache_key", "safety_identifier", "service_tier"),
        *("session_id", "store", "truncate_prompt_tokens"),
    }
)
# What must say nothing, if it is there at all.
_EMPTY = frozenset(
    {
        *("bad_words", "best_of", "echo", "frequency_penalty", "presence_penalty"),
        *("prompt_logprobs", "return_token_ids", "suffix", "tools", "use_beam_search"),
        *("logit_processors", "functions"),
    }
)


def continuable(shape: Shape, values: Mapping[str, Any], *, sampled: bool) -> dict[str, Any] | None:
    """Return the members that a continuation keeps; None if the answer must not be continued.

    Args:
        shape: The request's.
        values: The members of its body.
        sampled: Whether other tokens may follow than one engine would have given.
    """
    if not shape.stream or shape.sequences > 1 or shape.prompt_data:
        return None
    if shape.api not in _CONTINUED_AT or shape.direct:
        return None
    try:
        kept = continuable_tokens(values) if shape.api is Api.GENERATE else _continuable(values)
    except BodyError:
        return None  # A member that is too large to be read.
    if kept is None:
        return None
    if not is_greedy(kept) and (not sampled or kept.get("stop")):
        return None  # Of another sample nobody knows how much of it comes again.
    top = kept.get("top_logprobs")
    return kept if top is None or (type(top) is int and top >= 0) else None


def may_begin_again(
    shape: Shape, values: Mapping[str, Any], *, sampled: bool
) -> Mapping[str, Any] | None:
    """Return how tokens are drawn of an answer that may be asked for once more from its beginning.

    Args:
        shape: The request's.
        values: The members of its body.
        sampled: Whether a seed may be given to it, so that its tokens are drawn alike again.

    Returns:
        None if it must not be: other tokens would come, or the engine would do twice what it does.
    """
    try:
        sampling: Any = sampling_of(values)
        calls = shape.api is Api.RESPONSES and not _calls_nobody(values)
        if calls or not isinstance(sampling, Mapping):
            return None
        has_seed = shape.api in _SEEDED and (sampled or not draws_otherwise(sampling))
        return sampling if has_seed or is_greedy(sampling) else None
    except BodyError:
        return None  # A member that is too large to be read.


def draws_otherwise(sampling: Mapping[str, Any]) -> bool:
    """Return whether other tokens come if they are drawn again: they are sampled, and there is no seed."""
    return not is_greedy(sampling) and integer(sampling.get("seed")) in _NO_SEEDS


def _calls_nobody(values: Mapping[str, Any]) -> bool:
    """Return whether the engine calls no tool itself."""
    tools = values.get("tools") or ()
    return isinstance(tools, list | tuple) and all(
        isinstance(tool, dict) and tool.get("type") not in CALLED_BY_ENGINES for tool in tools
    )


def _continuable(values: Mapping[str, Any]) -> dict[str, Any] | None:
    kept: dict[str, Any] = {}
    for name in values:
        if name in _KEPT:
            kept[name] = values[name]
        elif name not in _SPENT and not _says_nothing(name, values[name]):
            return None
    return kept


def continued_at(api: Api) -> Api:
    """Return the endpoint at which an answer of `api` goes on."""
    return _CONTINUED_AT[api]


def sampling_of(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the members that say how tokens are drawn and how many; `kept` as by `continuable`."""
    sampling: Mapping[str, Any] = kept.get(SAMPLING, kept)
    return sampling


def is_greedy(kept: Mapping[str, Any]) -> bool:
    """Return whether each token is the most likely one."""
    temperature = sampling_of(kept).get("temperature")
    return isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW


def _says_nothing(name: str, value: object) -> bool:
    if name == "tool_choice":
        return value in (None, "none", "auto")  # Without tools, "auto" is nothing.
    if name == "response_format":
        return value is None or (isinstance(value, dict) and value.get("type") == "text")
    if name == "prompt_logprobs" and value == 0:
        return value is False  # It asks for the token's own.
    return name in _EMPTY and not value


def continued_body(kept: Mapping[str, Any], api: Api, ids: bytes, emitted_tokens: int) -> bytes:
    """Return the body that goes on behind `ids`, at the endpoint of `continued_at`.

    Args:
        kept: Members of the client's body; see `continuable`.
        api: The endpoint that the client asked.
        ids: Those of the prompt and of what was emitted, as JSON without the brackets.
        emitted_tokens: How many of them were emitted: fewer than the limit.
    """
    if api is Api.GENERATE:
        return continued_tokens_body(kept, ids, emitted_tokens)
    members = {name: value for name, value in kept.items() if name != "max_completion_tokens"}
    if api is Api.CHAT:
        newer = kept.get("max_completion_tokens")
        # A completion without a limit would end after 16 tokens; with null it has the context's.
        members["max_tokens"] = kept.get("max_tokens") if newer is None else newer
        top = members.pop("top_logprobs", None)
        if kept.get("logprobs"):
            members["logprobs"] = top or 0
    members |= remaining_limits(Api.COMPLETIONS, members, emitted_tokens)
    return b'%b, "prompt": [%b]}' % (dump(members)[:-1], ids)
