"""Going on with an answer of `/inference/v1/generate` on another rank (vLLM 0.32).

Ids go in and ids come out, so the ids that the client has are all that the next rank needs: they go behind
the prompt. Only what is known to mean the same there is continued: every member of the body and of its
`sampling_params` stands in one of the lists below.

Not continued is what begins anew with each request: grammars, penalties that count the output, stop
strings and bad words, whose text no event tells. Nor is text (`"output_mode": "text"`): an engine that
begins inside a character would say the prompt again, and the client has the ids of that character already.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.body import dump
from balanceroute.proxy.live.openai.resume import remaining_limits
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.openai.token_shape import PROMPT, SAMPLING

_KEPT = frozenset({"cache_salt", "model", "priority", "request_id", "stream", "stream_options"})
# What they say is in the ids of the prompt, or in the first event, or is about grammars alone.
_SPENT = frozenset(
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
        if name in _KEPT or name == SAMPLING:
            kept[name] = values[name]
        elif name == "output_mode":
            if values[name] not in (None, "tokens"):
                return None
        elif name not in _SPENT and values[name] is not None:
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
