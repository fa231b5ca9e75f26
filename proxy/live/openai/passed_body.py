"""The body of a request that one engine answers, as it may reach that engine.

It goes on as it came, except where the engine generates text: there the members that steer KV transfer
must not be a client's. They stand in the body, in `vllm_xargs`, and for `/inference/v1/generate` in
`sampling_params.extra_args` (vLLM 0.32's `SamplingParams`).
"""

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, refuse_internal


def engine_body(data: bytes, body: RequestBody) -> bytes:
    """Return what an engine that generates text gets of a client's body.

    Raises:
        BodyError: An internal member stands where it cannot be cut out.
    """
    values = body.values
    refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    sampling = values.get("sampling_params")
    if isinstance(sampling, dict):
        refuse_internal(sampling.get("extra_args"), "sampling_params.extra_args")
    if INTERNAL_FIELDS.isdisjoint(values):
        return data
    return body.encode({}, drop=INTERNAL_FIELDS)
