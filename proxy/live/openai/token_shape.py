"""What a request to `/inference/v1/generate` asks for: token ids in, token ids out (vLLM 0.32).

Its limits stand in `sampling_params`, which vLLM reads as its own `SamplingParams`. As everywhere only
what routing depends on is judged; anything else that is wrong is an engine's to refuse.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.body import BodyError, is_deep
from balanceroute.proxy.live.openai.numeric_members import check_priority, count, flag, integer
from balanceroute.proxy.live.openai.shape import Api, Shape, refuse_internal

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody

SAMPLING = "sampling_params"
PROMPT = "token_ids"
# A prompt that is more than its ids: only the engine that computes it knows how long it becomes.
_MEDIA = ("content_parts", "features")
# What only the engine that computes the prompt can say.
_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids", "trace_decode_token_ids")
# With the least value that is good: the prefill leg replaces them.
_REPLACED = (("max_tokens", 1), ("min_tokens", 0))


def read_token_shape(body: "RequestBody", *, max_sequences: int) -> Shape:
    """Return what `body` asks for.

    Raises:
        BodyError: A member that routing depends on is of the wrong type or out of range.
    """
    values = body.values
    model, sampling = values.get("model"), values.get(SAMPLING)
    if model is not None and not isinstance(model, str):
        raise BodyError("model must be a string", "model")
    stream = False if values.get("stream") is None else flag(values["stream"])
    if stream is None:
        raise BodyError("stream must be true or false", "stream")
    if "priority" in values:
        check_priority(values["priority"])
    prompt = body.summary(PROMPT)
    given: Mapping[str, Any] = sampling if isinstance(sampling, dict) else {}
    refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    refuse_internal(given.get("extra_args"), f"{SAMPLING}.extra_args")
    # A number of answers that cannot be read is the engine's to refuse.
    sequences = max(1, integer(given.get("n", 1)) or 1)
    if sequences > max_sequences:
        raise BodyError(f"the request asks for {sequences} answers, at most {max_sequences}", "n")
    ids = prompt.elements == prompt.integers > 0
    return Shape(
        api=Api.GENERATE,
        model=model or "",
        stream=stream,
        sequences=sequences,
        direct=_needs_one_engine(body, sampling, sequences, ids=ids),
        prompt_tokens=prompt.elements if ids else None,
        prompt_characters=1,
        prompt_data=0,
        max_tokens=count(given.get("max_tokens"), 1),
    )


def one_token(sampling: Mapping[str, Any], min_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters of a prefill leg."""
    return {**sampling, "max_tokens": 1, "min_tokens": min_tokens, "n": 1}


def _needs_one_engine(body: "RequestBody", sampling: object, sequences: int, *, ids: bool) -> str:
    """Return the member for which one engine has to do the whole request; empty if none has to."""
    if not ids:
        return PROMPT
    if not isinstance(sampling, dict) or is_deep(sampling):
        return SAMPLING
    for name in _MEDIA:
        if body.is_given(name):
            return name
    if sequences > 1 or integer(sampling.get("n", 1)) != 1:
        return f"{SAMPLING}.n"  # As in `shape.py`: each sequence would pull for itself.
    for name in _OF_PROMPT:
        if sampling.get(name) is not None:
            return f"{SAMPLING}.{name}"
    for name, least in _REPLACED:
        if sampling.get(name) is not None and count(sampling[name], least) is None:
            return f"{SAMPLING}.{name}"
    limit, wanted = count(sampling.get("max_tokens"), 1), count(sampling.get("min_tokens"), 0)
    if limit is not None and wanted is not None and wanted > limit:
        return f"{SAMPLING}.min_tokens"
    return ""
