"""The emulated language model: the next token is a hash of everything before it.

So a text continues in the same way wherever it is computed: on one engine, through prefill and
decode, or from a prompt that already has the first part of the answer. The sampling key also
determines it: temperature, seed, and the index among n choices.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from balanceroute.proxy.lab.emulate.tokens import EOS_WORD, TOKEN_TEXTS, VOCABULARY_SIZE

EOS = -1
_MASK = 0xFFFF_FFFF
# Log-probabilities are multiples of this: exact in binary, and so the same in all JSON.
_LOGPROB_QUANTUM = 1 / 1024
_LOGPROB_GAP = 0.125
_STRIDE = 7_919  # A prime: the alternatives of a token differ.


def prompt_digest(tokens: bytes) -> bytes:
    """Return the identity of a prompt's KV cache, from packed token ids."""
    return hashlib.blake2b(tokens, digest_size=16).digest()


def unit_draws(seed: bytes) -> Iterator[float]:
    """Yield numbers in [0, 1) without end, determined by `seed`."""
    number = 0
    while True:
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=seed).digest()
        yield int.from_bytes(digest, "little") / 2**64
        number += 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token.

    Attributes:
        logprob: Natural logarithm of its probability.
        others: Ids of further candidates, most likely first, with theirs.
    """

    token: str
    logprob: float
    others: tuple[tuple[int, float], ...]


class Sampler:
    """Generates a text, token by token.

    Args:
        prompt: Packed token ids.
        key: Further input of the hash, at most 64 bytes.
        mean_tokens: Mean number of tokens until the text ends by itself.
    """

    __slots__ = ("_eos_below", "_state", "draw")

    def __init__(self, prompt: bytes, key: bytes, mean_tokens: float) -> None:
        self._state = hashlib.blake2b(prompt, digest_size=16, key=key)
        self._eos_below = int(_MASK / mean_tokens)
        self.draw = 0

    def next(self, *, may_end: bool) -> int:
        """Return the next token, or EOS if the text may end here and does."""
        draw = self.draw = int.from_bytes(self._state.copy().digest(), "little")
        if may_end and (draw >> 32) & _MASK < self._eos_below:
            return EOS
        token = (draw & _MASK) % VOCABULARY_SIZE
        self._state.update(token.to_bytes(8, "little"))
        return token

    def force(self, token: int) -> None:
        """Emit `token`, whatever the model would emit."""
        self.draw = int.from_bytes(self._state.copy().digest(), "little")
        self._state.update(token.to_bytes(8, "little"))

    def happens(self, probability: float, *, word: int) -> bool:
        """Return whether an event happens at the last token, by one of the draw's four words."""
        return (self.draw >> 32 * word) & _MASK < probability * 2**32

    def logprob(self, said: str, candidates: int) -> TokenLogprob:
        """Return the log-probability of the last token, with those of `candidates` - 1 others."""
        draw = self.draw
        logprob = -((draw >> 64 & _MASK) % 4096) * _LOGPROB_QUANTUM
        base = draw >> 96
        others = tuple(
            ((base + i * _STRIDE) % VOCABULARY_SIZE, logprob - i * _LOGPROB_GAP)
            for i in range(1, candidates)
        )
        return TokenLogprob(said or EOS_WORD, logprob, others)


def prompt_logprobs(tokens: list[int], words: list[str], candidates: int) -> list[object]:
    """Return the log-probabilities of a prompt's tokens as vLLM answers them, the first null."""
    sampler = Sampler(b"", b"prompt", 1.0)
    entries: list[object] = []
    for token, word in zip(tokens, words, strict=True):
        sampler.force(token)
        said = sampler.logprob(word, candidates)
        entry = {str(token): _ranked(said.logprob, 1, word)}
        for rank, (other, logprob) in enumerate(said.others, start=2):
            entry.setdefault(str(other), _ranked(logprob, rank, TOKEN_TEXTS[other]))
        entries.append(entry if entries else None)
    return entries


def _ranked(logprob: float, rank: int, word: str) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": word}
