"""The members of the Responses API that need an engine to keep something for a later request.

vLLM keeps responses in the memory of one engine (and only with VLLM_ENABLE_RESPONSES_API_STORE); the
next request may reach another engine. So what depends on them is refused. `store` is let pass: it is
true by default, and vLLM ignores it too where it keeps nothing.
"""

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.shape import Api


def refuse_state(api: Api, body: RequestBody) -> None:
    """Refuse a request that needs an earlier response, or is to be asked for later.

    Raises:
        BodyError: It has `previous_response_id` or `background`.
    """
    if api is not Api.RESPONSES:
        return
    if body.values.get("previous_response_id") is not None:
        raise BodyError(
            "previous_response_id is not served: responses are not kept. "
            "Send the whole conversation in `input`",
            "previous_response_id",
        )
    if body.values.get("background"):
        raise BodyError(
            "background is not served: responses are not kept, so nobody could fetch the answer",
            "background",
        )
