"""Requests that cannot be split between the roles, and which engine does all of such a request.

A decode rank computes prompts in the step of all other requests' tokens, and not every decode rank can:
vllm-ascend frees the weights that this takes (MLAPO, vllm-ascend#11882), and the worker dies with all
its requests. A prefiller is an engine with everything it takes to decode as well.
"""

from enum import Enum
from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.body import BodyError

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.shape import Shape


class Direct(Enum):
    """Who serves requests that one engine has to do whole."""

    PREFILL = "prefill"
    DECODE = "decode"
    REFUSE = "refuse"


# Up to Python 3.11 each look at a member of an enumeration is a call.
_REFUSE = Direct.REFUSE
# Of English text, and of program text fewer. Every process must come to the same result, so the mean of
# the prompts that were counted is of no use here.
_CHARACTERS_PER_TOKEN = 4


def guessed_tokens(shape: "Shape") -> int:
    """Return the prompt tokens of a request that no engine has counted."""
    known = shape.prompt_tokens
    return shape.prompt_characters // _CHARACTERS_PER_TOKEN if known is None else known


def check_direct(shape: "Shape", direct: Direct) -> None:
    """Reject a request that one engine has to do whole, if none is to.

    Raises:
        BodyError: None is to.
    """
    if direct is not _REFUSE:
        return
    why = "one engine would have to do the whole request, which this deployment does not serve"
    if shape.direct == shape.api.value:
        raise BodyError(f"{shape.direct} is not served: {why}")
    raise BodyError(f"{shape.direct} has a value that is not served: {why}", shape.direct)
