"""Going on with an answer on another rank, from the ids of its tokens.

The prompt of the request that continues is the ids of the first one's prompt and of the answer so far.
`/v1/completions` alone takes ids, so a chat goes on there, and its events are written as a chat's
(`continuation_stream.py`). A request is continued only if every member of its body is known to mean the
same there, or to be of no use: each stands in one of the lists below.

Not continued is what begins anew with each request in vLLM: grammars, penalties that count the output,
parsers of tool calls and reasoning. Echoes and a client's own wish for ids would have to be put together.
Stop strings begin anew, too, and are continued where what an engine says again is the same
(`token_ids.py`). An answer that is token ids goes on at its own endpoint.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from balanceroute.proxy.live.openai.answer import (
    dump_compact,
    events_head,
    first_token_event,
    token_events,
    write_events,
)
from balanceroute.proxy.live.openai.body import BodyError, dump, is_deep
from balanceroute.proxy.live.openai.errors import CannotResumeError
from balanceroute.proxy.live.openai.shape import (
    CALLED_BY_ENGINES,
    COMPLETION_TOKENS,
    CONTINUED_AT,
    PROMPT,
    SAMPLING,
    Api,
    Shape,
    integer,
    is_greedy,
    sampling_of,
)
from balanceroute.proxy.live.openai.stream_reader import RepeatedText, choices_of, parsed, text_of
from balanceroute.proxy.live.openai.token_ids import care_of

# Going on with an answer on another rank: the request that continues after what was emitted.
#
# Over plain OpenAI HTTP the emitted part goes back as text: behind the prompt of a completion, or
# as an assistant message to be continued (vLLM: `continue_final_message`). What text cannot carry
# (tool calls, reasoning, several sequences, a prompt of token ids, the state of a grammar) cannot
# be resumed. Nor can a request with a member that might begin anew, as a budget for thinking
# does, or would take the emitted part for the prompt's, as a truncation does: every member stands
# in one of the lists below.

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
_EMPTY_IN_TURNS = frozenset({"functions", "suffix", "use_beam_search", "watermarking"})
# Characters of a member's name that the error shows.
_MAX_NAME = 64


def resumed_members(
    api: Api, values: Mapping[str, Any], text: str, emitted_tokens: int
) -> dict[str, object]:
    """Return the members of the body that change when `text` was emitted already.

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
        if (
            name in _CARRIED
            or values[name] is None
            or (name in _EMPTY_IN_TURNS and not values[name])
        ):
            continue
        if name == "include_reasoning" and values[name] is True:
            continue  # With false, the continuation would lose reasoning that no client has.
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
    """Return the limits of an answer of which some tokens were emitted already. Raises CannotResumeError."""
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


# Going on with an answer of `/inference/v1/generate` on another rank (vLLM 0.32).
#
# Ids go in and ids come out, so the ids that the client has are all that the next rank needs:
# they go behind the prompt. Only what is known to mean the same there is continued: every member
# of the body and of its `sampling_params` stands in one of the lists below.
#
# Not continued is what begins anew with each request: grammars, penalties that count the output,
# stop strings and bad words, whose text no event holds. Nor is text (`"output_mode": "text"`): an
# engine that begins inside a character would say the prompt again, and the client has the ids of
# that character already.

_KEPT_OF_TOKENS = frozenset(
    {"cache_salt", "model", "priority", "request_id", "stream", "stream_options"}
)
# What they say is in the ids of the prompt, or in the first event, or is about grammars alone.
_SPENT_OF_TOKENS = frozenset(
    {"reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "token_offsets", PROMPT}
)
_KEPT_SAMPLING = frozenset(
    {
        *("allowed_token_ids", "detokenize", "ignore_eos", "include_stop_str_in_output"),
        *("logit_bias", "logprobs", "max_tokens", "min_p", "min_tokens", "n", "output_kind"),
        *("repetition_penalty", "seed", "skip_reading_prefix_cache", "skip_special_tokens"),
        *("spaces_between_special_tokens", "stop_token_ids", "stream_interval", "temperature"),
        *("top_k", "top_p"),
    }
)
# What must say nothing, if it is there at all.
_EMPTY_SAMPLING = frozenset(
    {
        *("bad_words", "extra_args", "flat_logprobs", "frequency_penalty", "logprob_token_ids"),
        *("presence_penalty", "prompt_logprob_token_ids", "repetition_detection", "skip_clone"),
        *("routed_experts_prompt_start", "stop", "structured_outputs", "watermarking"),
    }
)
# With 0 they ask for something.
_NULL_SAMPLING = frozenset(
    {"prompt_logprobs", "prompt_logprob_start", "thinking_token_budget", "trace_decode_token_ids"}
)


def continuable_tokens(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members that a continuation keeps; None if the answer must not be continued.

    Args:
        values: The members of the body of a request that two legs serve.

    Raises:
        BodyError: A member is too large to be read.
    """
    kept: dict[str, Any] = {}
    for name in values:
        if name in _KEPT_OF_TOKENS or name == SAMPLING:
            kept[name] = values[name]
        elif name == "output_mode":
            if values[name] not in (None, "tokens"):
                return None
        elif name not in _SPENT_OF_TOKENS and values[name] is not None:
            return None
    for name, value in kept[SAMPLING].items():
        nothing = (name in _EMPTY_SAMPLING and not value) or (
            name in _NULL_SAMPLING and value is None
        )
        if name not in _KEPT_SAMPLING and not nothing:
            return None
    return kept


def continued_tokens_body(kept: Mapping[str, Any], ids: bytes, emitted_tokens: int) -> bytes:
    """Return the body that goes on behind `ids`; see `continued_body`."""
    sampling = kept[SAMPLING]
    limits = remaining_limits(Api.GENERATE, sampling, emitted_tokens)
    members = {**kept, SAMPLING: {**sampling, **limits}}
    return b'%b, "%b": [%b]}' % (dump(members)[:-1], PROMPT.encode(), ids)


# What vLLM's `SamplingParams` takes for no seed.
_NO_SEEDS = (None, -1)
# Those whose requests have a seed.
_SEEDED = frozenset({Api.CHAT, Api.COMPLETIONS, Api.GENERATE, Api.RESPONSES})
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
    if shape.api not in CONTINUED_AT or shape.direct:
        return None
    try:
        kept = continuable_tokens(values) if shape.api is Api.GENERATE else _continuable(values)
    except BodyError:
        return None  # A member that is too large to be read.
    if kept is None:
        return None
    if not is_greedy(kept) and (not sampled or kept.get("stop")):
        return None  # Another sample may repeat any part of the answer.
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
        calls = shape.api is Api.RESPONSES and not _calls_no_tool(values)
        if calls or not isinstance(sampling, Mapping):
            return None
        has_seed = shape.api in _SEEDED and (sampled or not draws_otherwise(sampling))
        return sampling if has_seed or is_greedy(sampling) else None
    except BodyError:
        return None  # A member that is too large to be read.


def draws_otherwise(sampling: Mapping[str, Any]) -> bool:
    """Return whether other tokens come if they are drawn again: they are sampled, and there is no seed."""
    return not is_greedy(sampling) and integer(sampling.get("seed")) in _NO_SEEDS


def _calls_no_tool(values: Mapping[str, Any]) -> bool:
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


def _says_nothing(name: str, value: object) -> bool:
    if name == "tool_choice":
        return value in (None, "none", "auto")  # Without tools, "auto" is nothing.
    if name == "response_format":
        return value is None or (isinstance(value, dict) and value.get("type") == "text")
    if name == "prompt_logprobs" and value == 0:
        return value is False  # It asks for the token's own.
    return name in _EMPTY and not value


def continued_body(kept: Mapping[str, Any], api: Api, ids: bytes, emitted_tokens: int) -> bytes:
    """Return the body that goes on behind `ids`, at the endpoint of `CONTINUED_AT`.

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


# The first token of a stream, as a prefiller says it, and which streams may begin with it.
#
# A prefiller is asked for one token and says the same as the decode rank will, if both draw
# alike. So the client can have it before there is a rank. May begin so what may also be continued
# from ids (`continuation.py`): if the rank says something else, the answer goes on behind the
# prefiller's token.

_PROMPT = re.compile(rb'"prompt_token_ids":\s*+\[([\d,\s]++)\]')
_INCOMPLETE = "\ufffd"  # What a detokeniser writes for bytes that are no character.


class PrefillFirstToken(Struct, frozen=True):
    """A first token."""

    text: str  # Empty in an answer that is token ids alone.
    id: int  # Its id.
    ids: bytes  # The prompt's and this one's, as JSON without the brackets.
    head: bytes  # Of its events, all that stands before the choices.
    events: bytes  # What a stream begins with up to it.


def may_begin_early(shape: Shape, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members that a continuation keeps; None if the first token is to wait for a rank."""
    if shape.max_tokens == 1:
        return None  # A rank ends such an answer, and has the KV cache freed.
    kept = continuable(shape, values, sampled=True)
    if kept is None:
        return None
    sampling = sampling_of(kept)
    if shape.max_tokens is None and sampling.get("min_tokens"):
        return None  # A rank refuses more than the context has room for; a prefiller is not asked.
    if care_of(sampling) is not None:
        return None  # A stop string may begin in it; and its log-probabilities stand elsewhere.
    options = kept.get("stream_options")
    # The count in each event is another engine's business in each version.
    return None if isinstance(options, dict) and options.get("continuous_usage_stats") else kept


def read_first_token(api: Api, message: Mapping[str, Any], body: bytes) -> PrefillFirstToken | None:
    """Return the first token that a prefiller's answer says; None if a client must not have it yet."""
    choice = message["choices"][0]
    said = choice.get("message") if api is Api.CHAT else choice
    if not isinstance(said, dict) or choice.get("finish_reason") != "length":
        return None
    text = said.get("content" if api is Api.CHAT else "text")
    # Within a character, or a special token: the event of the next one has its text.
    if not isinstance(text, str) or not text or _INCOMPLETE in text:
        return None
    # A parser of reasoning or of tool calls may have kept something back.
    if api is Api.CHAT and any(said[name] for name in said.keys() - {"role", "content"}):
        return None
    if isinstance(message["usage"].get("completion_tokens_details"), dict):
        return None
    ids, prompt = choice.get("token_ids"), _PROMPT.search(body)
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int or prompt is None:
        return None
    head = dump_compact(events_head(api, message))
    return PrefillFirstToken(
        text=text,
        id=ids[0],
        ids=b"%b,%d" % (prompt[1], ids[0]),
        head=b"data: %b," % head[:-1],
        events=write_events(token_events(api, message)),
    )


def read_first_id(message: Mapping[str, Any], prompt: bytes) -> PrefillFirstToken | None:
    """Return the first id that a prefiller's answer of token ids says; None as for `read_first_token`.

    Args:
        message: The answer.
        prompt: The JSON text of the list of the prompt's ids.
    """
    choice = message["choices"][0]
    ids = choice.get("token_ids")
    if choice.get("finish_reason") != "length" or choice.get("routed_experts") is not None:
        return None
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int:
        return None
    return PrefillFirstToken(
        text="",
        id=ids[0],
        ids=b"%b,%d" % (prompt.strip(b"[] \t\r\n"), ids[0]),
        head=b"",
        events=write_events([first_token_event(message)]),
    )


def says_again(said: PrefillFirstToken, left: RepeatedText, event: bytes) -> bool | None:
    """Return whether a rank says the same as a prefiller; None if that is still open.

    Args:
        said: By the prefiller.
        left: What of its text has yet to come; events with a part of it are taken off.
        event: The next one of the rank's stream.
    """
    message = parsed(event)
    for choice in [] if message is None else choices_of(message):
        if not said.text:
            ids = choice.get("token_ids")
            if ids:
                return isinstance(ids, list) and ids[0] == said.id
        else:
            text = text_of(choice)
            if text is None or left.trim(text) is None:
                return False
            if left.over:
                return True
        if choice.get("finish_reason"):
            return False
    return None
