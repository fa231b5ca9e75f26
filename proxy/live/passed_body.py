"""The body of a request that one engine answers, as it may reach that engine.

It goes on as it came, except where the engine generates text: there the members that steer KV transfer
must not be a client's. They stand in the body, in `vllm_xargs`, and for `/inference/v1/generate` in
`sampling_params.extra_args` (vLLM 0.32's `SamplingParams`).
"""

from balanceroute.proxy.live.body import BodyError, RequestBody
from balanceroute.proxy.live.routes import Route
from balanceroute.proxy.live.shape import INTERNAL_FIELDS


def engine_body(route: Route, data: bytes) -> bytes:
    """Return what the engine gets of a client's body.

    Raises:
        BodyError: The route needs a JSON object and this is none, or an internal member stands where
            it cannot be cut out.
    """
    if not route.generates:
        return data
    body = RequestBody(data)
    values = body.values
    _refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    sampling = values.get("sampling_params")
    if isinstance(sampling, dict):
        _refuse_internal(sampling.get("extra_args"), "sampling_params.extra_args")
    if INTERNAL_FIELDS.isdisjoint(values):
        return data
    return body.encode({}, drop=INTERNAL_FIELDS)


def _refuse_internal(members: object, where: str) -> None:
    if isinstance(members, dict) and not INTERNAL_FIELDS.isdisjoint(members):
        raise BodyError(f"{where} must not have {min(INTERNAL_FIELDS & members.keys())}", where)
