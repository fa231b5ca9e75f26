"""How many tokens a prompt will have, before an engine has counted them.

Text has a number of characters a token, which is learnt from what prefillers count. An image, a sound or
a file has as many tokens as the model makes of it, which its base64 does not tell: it counts as a
constant until the prefill counts it, and teaches nothing about text.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.shape import Shape

# A first guess; and of a prompt that is mostly text it is never outside of these.
CHARACTERS_PER_TOKEN = 4.0
_LEAST_RATIO, _MOST_RATIO = 0.5, 8.0
# Weight of one more prompt in the running mean.
_WEIGHT = 1 / 32
# Of an image, a sound or a file. vLLM makes some 600 to 1,400 tokens of an image of a megapixel.
DATA_TOKENS = 1_000
# Of all sequences of a request; sums of these stay far below 2^63.
_MOST_TOKENS = 2**30


class TokenEstimate:
    """Learns how many characters a token has."""

    def __init__(self) -> None:
        self._characters_per_token = CHARACTERS_PER_TOKEN

    def tokens(self, shape: "Shape") -> int:
        """Return what a prompt of the request is taken to have: exact for token ids, at least 1."""
        tokens = shape.prompt_tokens
        if tokens is None:
            tokens = round(shape.prompt_characters / self._characters_per_token)
            tokens += DATA_TOKENS * shape.prompt_data
        return max(1, min(tokens, _MOST_TOKENS // shape.sequences))

    def learn(self, shape: "Shape", prompt_tokens: int) -> None:
        """Take note of a prompt that was counted, unless its text is not what was counted."""
        if shape.prompt_tokens is not None or shape.prompt_data:
            return
        ratio = shape.prompt_characters / prompt_tokens
        if _LEAST_RATIO <= ratio <= _MOST_RATIO:
            self._characters_per_token += _WEIGHT * (ratio - self._characters_per_token)
