"""The bodies of the two legs: the client's own, with the documented overrides and nothing else.

Prefill leg: one token, one sequence, no stream, nothing stored. Both legs: the connector's
`kv_transfer_params`, and never a client's (`read_shape` refuses them within `vllm_xargs`). Both must
tokenise alike, so nothing that reaches the prompt is touched.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.numeric_members import count
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, Api, refuse_internal
from balanceroute.proxy.live.openai.token_shape import SAMPLING, one_token

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.token_counts import CountsAsked
    from balanceroute.proxy.wire.messages import Payload

# A text: to encode the members costs more than all the rest of the body.
_ONE_TOKEN = b'"stream": false, "max_tokens": 1, "min_tokens": %d, "n": 1, '
_PAST_END = b'"ignore_eos": true, '
_NEWER_LIMIT = b'"max_completion_tokens": 1, '
# No `min_tokens` there: vLLM's messages may end at once, and its responses are not to.
_ONE_OF_MESSAGE = b'"stream": false, "max_tokens": 1, '
_ONE_OF_RESPONSE = b'"stream": false, "max_output_tokens": 1, "ignore_eos": true, "store": false, '
# None of these is the client's on the prefill leg.
_REPLACED = frozenset(
    {
        "best_of",
        "max_completion_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
    }
)
_REPLACED_IN_AGENTS = frozenset(
    {"ignore_eos", "max_output_tokens", "max_tokens", "store", "stream", "stream_options"}
)
_ASKED = frozenset({"stream_options"})
# What may end an answer, beside its limit.
_ENDS = frozenset({"ignore_eos", "stop", "stop_token_ids"})
_REPLACED_PAST_END = _REPLACED | _ENDS
# Members that bind the answer to a grammar, in the words of all versions.
_GRAMMARS = (
    *("structured_outputs", "structural_tag", "guided_json", "guided_regex", "guided_choice"),
    "guided_grammar",
)
_NAMED = ("response_format", "tool_choice")
_MAY_BIND = frozenset(_GRAMMARS) | frozenset(_NAMED)
# What leaves an answer free, by these two.
_FREE = re.compile(rb'|null|"(?:auto|none)"|\{\s*"type"\s*:\s*"text"\s*\}')
# Up to Python 3.11 each look at a member of an enumeration is a call.
_GENERATE, _MESSAGES, _RESPONSES = Api.GENERATE, Api.MESSAGES, Api.RESPONSES


@cache
def _union(drop: frozenset[str], replaced: frozenset[str]) -> frozenset[str]:
    return drop | replaced


def prefill_body(
    body: "RequestBody",
    members: Mapping[str, object],
    params: bytes,
    *,
    api: Api = Api.COMPLETIONS,
    drop: frozenset[str] = INTERNAL_FIELDS,
    min_tokens: int = 1,
    past_end: bool = False,
) -> "Payload":
    """Return the prefill leg's body.

    Args:
        body: The client's.
        members: Changed by an earlier binding; see `resumed_members`.
        params: The connector's, as JSON.
        api: The endpoint, which says where the limits stand.
        drop: Members of the client's that no engine gets.
        min_tokens: 0 if the first token may be one that ends the answer; by `least_tokens`.
        past_end: Whether it does not end it then: the rank draws anew, so that is for it to say.
    """
    replaced = _REPLACED
    if api is _GENERATE:
        sampling = members[SAMPLING] if SAMPLING in members else body.values[SAMPLING]
        assert isinstance(sampling, Mapping)
        if past_end:
            sampling = {name: value for name, value in sampling.items() if name not in _ENDS}
            sampling["ignore_eos"] = True
        members = {**members, SAMPLING: one_token(sampling, min_tokens)}
    if api is _MESSAGES or api is _RESPONSES:
        one = _ONE_OF_MESSAGE if api is _MESSAGES else _ONE_OF_RESPONSE
        replaced = _REPLACED_IN_AGENTS
    else:
        one = _ONE_TOKEN % min_tokens
        if "max_completion_tokens" in body.values:
            one += _NEWER_LIMIT
        if past_end and api is not _GENERATE:
            one, replaced = one + _PAST_END, _REPLACED_PAST_END
    last = b'%b"kv_transfer_params": %b' % (one, params)
    if members:
        members = {name: value for name, value in members.items() if name not in replaced}
    return body.encode(members, drop=_union(drop, replaced), last=last)


def least_tokens(api: Api, body: "RequestBody") -> int:
    """Return how many tokens a prefill leg must have: 0 if its grammar may allow none.

    Elsewhere one is asked for, as not every connector keeps the KV cache of an answer that has ended.
    A grammar whose first token is the end leaves no legal one then, and engines fail. They draw that
    token, but do not end there (`past_end` of `prefill_body`). /v1/messages has no member for it.
    /v1/responses has one that lets an answer go on behind its end, grammar or not.
    """
    if api is _MESSAGES:
        return 0
    if api is _RESPONSES:
        return 1
    values: Mapping[str, object] = body.values
    if api is _GENERATE:
        sampling = values.get(SAMPLING)
        values = sampling if isinstance(sampling, Mapping) else {}
        bound = values.get("structured_outputs") is not None
    else:
        bound = not _MAY_BIND.isdisjoint(values) and (
            any(map(body.is_given, _GRAMMARS))
            or any(not _FREE.fullmatch(body.value_text(name)) for name in _NAMED)
        )
    return 0 if bound and not count(values.get("min_tokens"), 1) else 1


def decode_body(
    body: "RequestBody",
    members: Mapping[str, object],
    params: bytes | None,
    asked: "CountsAsked | None" = None,
    *,
    drop: frozenset[str] = INTERNAL_FIELDS,
) -> "Payload":
    """Return the decode leg's body.

    Args:
        body: The client's.
        members: Changed by an earlier binding; see `resumed_members`.
        params: The connector's, as JSON; None if the engine is to compute the prompt itself.
        asked: Which counts the engine is asked for.
        drop: Members of the client's that no engine gets.
    """
    last = b"" if params is None else b'"kv_transfer_params": ' + params
    if asked is not None and members:
        members = {**members, "stream_options": asked.options}
    elif asked is not None:  # Nearly always: its text is there already.
        last = asked.member + b", " + last if last else asked.member
        drop = _union(drop, _ASKED)
    return body.encode(members, drop=drop, last=last)


def engine_body(data: bytes, body: "RequestBody") -> bytes:
    """Return a client's body as it may reach the one engine that generates text for it.

    The members that steer KV transfer must not be a client's. They stand in the body and in `vllm_xargs`.

    Raises:
        BodyError: An internal member stands where it cannot be cut out.
    """
    values = body.values
    refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    if INTERNAL_FIELDS.isdisjoint(values):
        return data
    return bytes(body.encode({}, drop=INTERNAL_FIELDS))
