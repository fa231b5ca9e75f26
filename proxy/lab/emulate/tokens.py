"""The emulated tokeniser and chat template.

A token is a word: a run of characters between white space. White space itself is no token. So a text
of N words has exactly N tokens, and the tokens of joined texts add up.

Token ids below `VOCABULARY_SIZE` are the words that the emulated model emits: id 12 is "t12". Some have
quotes, backslashes or non-ASCII letters, to test what relays them. Every other word has an id above,
by its hash. Decoding ids gives the words joined by one space; of words outside the vocabulary only
recent ones are kept.

A token that ends within a character, as those of byte-level tokenisers do, has an id of its own: that of
its word plus `FRAGMENTS`. No text is tokenised to it, and to the model it is the word.

The chat template adds two tokens to a conversation and two to each message:

    <|begin|> <|user|> words of the message <|end|> <|assistant|>
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from balanceroute.proxy.core.errors import ConfigError

VOCABULARY_SIZE = 16_384
# Above all hashed ids.
FRAGMENTS = 2**31
EOS_WORD = "<|eos|>"
# Opens the assistant's turn.
ASSISTANT = "<|assistant|>"
_REMEMBERED_WORDS = 1 << 18
# For shorter texts the attempt to parse them in one piece does not pay.
_LONG_TEXT = 1 << 10
_DECORATIONS = ('"t{}"', "t{}\\", "é{}", "漢{}", "🙂{}", "</t{}>", "'t{}", "{{t{}}}")


def _spell(token: int) -> str:
    if token % 31:
        return f"t{token}"
    return _DECORATIONS[token // 31 % len(_DECORATIONS)].format(token)


WORDS = tuple(map(_spell, range(VOCABULARY_SIZE)))
# The text of each token: the word after white space, sometimes a new line.
TOKEN_TEXTS = tuple(("\n" if i % 53 == 0 else " ") + word for i, word in enumerate(WORDS))


class _Ids(dict[str, int]):
    """Ids by word; drops words outside the vocabulary when there are too many."""

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[int, str] = {}
        self._reset()

    def _reset(self) -> None:
        self.clear()
        self.words.clear()
        self.update(self._vocabulary())
        for number in range(VOCABULARY_SIZE):
            self[f"t{number}"]  # Also those that have another spelling in the vocabulary.

    @staticmethod
    def _vocabulary() -> Iterable[tuple[str, int]]:
        return zip(WORDS, range(VOCABULARY_SIZE), strict=True)

    def __missing__(self, word: str) -> int:
        if len(self.words) >= _REMEMBERED_WORDS:
            self._reset()
        hashed = zlib.crc32(word.encode("utf-8", "surrogatepass"))
        token = VOCABULARY_SIZE + hashed % (2**31 - VOCABULARY_SIZE)
        self[word] = token
        self.words[token] = word
        return token


_IDS = _Ids()
_NUMBERED_IDS = np.array([_IDS[f"t{number}"] for number in range(VOCABULARY_SIZE)])


def tokenise(text: str) -> list[int]:
    if len(text) >= _LONG_TEXT and text.isascii():
        ids = _tokenise_numbered(text.encode())
        if ids is not None:
            return ids
    return list(map(_IDS.__getitem__, text.split()))


def _tokenise_numbered(text: bytes) -> list[int] | None:
    """Return the ids of a text of words `t<number>` with one space between; None for any other text.

    Long prompts of replays are such texts, and this takes a fifth of the time: looking up so many
    words in a dictionary misses the processor's caches.
    """
    words = text.count(b"t")
    if text.translate(None, b"t0123456789 ") or not text.startswith(b"t"):
        return None
    if not text.count(b" t") == text.count(b" ") == words - 1:
        return None
    numbers = np.fromstring(text.replace(b"t", b""), dtype=np.int64, sep=" ")
    if len(numbers) != words or not 0 <= numbers.min() <= numbers.max() < VOCABULARY_SIZE:
        return None
    digits = words + sum(int((numbers >= 10**power).sum()) for power in range(1, 5))
    if digits + words + words - 1 != len(text):
        return None  # A number begins with a zero, so it is another word.
    ids: list[int] = _NUMBERED_IDS[numbers].tolist()
    return ids


def decode(tokens: Iterable[int]) -> str:
    """Return the words of token ids, joined by spaces."""
    return " ".join(map(word_of, tokens))


def word_of(token: int) -> str:
    """Return the word of a token id; `t<id>` for an id whose word is not known."""
    token = whole(token)
    if 0 <= token < VOCABULARY_SIZE:
        return WORDS[token]
    return _IDS.words.get(token, f"t{token}")


def ends_within_character(token: int) -> bool:
    """Return whether a token's text is incomplete without the next one's."""
    return FRAGMENTS <= token < FRAGMENTS + VOCABULARY_SIZE


def whole(token: int) -> int:
    """Return the id of a token's word, which may end within a character."""
    return token - FRAGMENTS if ends_within_character(token) else token


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, so that they can be hashed: what the model reads."""
    if tokens and max(tokens) >= FRAGMENTS:
        tokens = list(map(whole, tokens))
    return array("Q", tokens).tobytes()


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: object = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return a conversation as the text that is tokenised.

    At its end the assistant's turn is opened, or the last message is left open to be continued.
    """
    parts = ["<|begin|>"]
    if tools:
        parts += ["<|tools|>", json.dumps(tools), "<|end|>"]
    for message in messages:
        parts += [f"<|{message.get('role')}|>", _content(message), "<|end|>"]
    if continue_final_message:
        parts.pop()
    elif add_generation_prompt:
        parts.append(ASSISTANT)
    return " ".join(parts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return f"{content or ''}{' ' + json.dumps(calls) if calls else ''}"


# The emulated language model: the next token is a hash of everything before it.
#
# So a text continues in the same way wherever it is computed: on one engine, through prefill and
# decode, or from a prompt that already has the first part of the answer. The sampling key also
# determines it: temperature, seed, and the index among n choices.

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
    token: str
    logprob: float  # Natural logarithm of its probability.
    # Ids of further candidates, most likely first, with theirs.
    alternatives: tuple[tuple[int, float], ...]


class Sampler:
    """Generates a text, token by token, from packed token ids and a key of at most 64 bytes."""

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
        """Return the log-probability of the last token, with those of `candidates` - 1 alternatives."""
        draw = self.draw
        logprob = -((draw >> 64 & _MASK) % 4096) * _LOGPROB_QUANTUM
        base = draw >> 96
        alternatives = tuple(
            ((base + i * _STRIDE) % VOCABULARY_SIZE, logprob - i * _LOGPROB_GAP)
            for i in range(1, candidates)
        )
        return TokenLogprob(said or EOS_WORD, logprob, alternatives)


def prompt_logprobs(tokens: list[int], words: list[str], candidates: int) -> list[object]:
    """Return the log-probabilities of a prompt's tokens as vLLM answers them, the first null."""
    sampler = Sampler(b"", b"prompt", 1.0)
    entries: list[object] = []
    for token, word in zip(tokens, words, strict=True):
        sampler.force(token)
        said = sampler.logprob(word, candidates)
        entry = {str(token): _ranked(said.logprob, 1, word)}
        for rank, (other, logprob) in enumerate(said.alternatives, start=2):
            entry.setdefault(str(other), _ranked(logprob, rank, TOKEN_TEXTS[other]))
        entries.append(entry if entries else None)
    return entries


def _ranked(logprob: float, rank: int, word: str) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": word}


# The lengths of the answers to named requests, as set by a load generator.
#
# A replay knows the length of every answer from its trace. It sends the lengths to the engines on
# a separate route (`POST /emulation/lengths`), by the `X-Request-Id` that a proxy forwards, and
# not in the requests. So a proxy and its predictor learn a length when the answer ends, as with
# real engines.

# The oldest are dropped: a fleet may serve many replays.
MAX_LENGTHS = 2_000_000
_MAX_TOKENS = 2**31 - 1


class AnswerLengths:
    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, tokens: Mapping[str, Any]) -> int:
        """Set how many tokens some answers have, including the one that ends each; return how many.

        Raises:
            ConfigError: One is not a whole number from 1 to 2**31 - 1; none is set.
        """
        for name, count in tokens.items():
            if type(count) is not int or not 1 <= count <= _MAX_TOKENS:
                raise ConfigError(f"{name!r}: {count!r} is not from 1 to {_MAX_TOKENS}")
        self._tokens |= tokens
        while len(self._tokens) > MAX_LENGTHS:
            del self._tokens[next(iter(self._tokens))]
        return len(tokens)

    def of(self, request_id: str) -> int | None:
        """Return how many tokens the answer has; None to let the model decide."""
        return self._tokens.get(request_id)

    def handed_back(self, request_id: str, emitted: int) -> None:
        """Note that a request ended as recomputed after `emitted` tokens; its next part is shorter."""
        left = self._tokens.get(request_id)
        if left is not None:
            self._tokens[request_id] = max(1, left - emitted)
