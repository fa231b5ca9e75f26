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

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

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
    """Return the token ids of a text."""
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

    Args:
        messages: OpenAI messages.
        tools: OpenAI tool definitions, or None.
        add_generation_prompt: Open the assistant's turn at the end.
        continue_final_message: Leave the last message open, to continue it.
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
