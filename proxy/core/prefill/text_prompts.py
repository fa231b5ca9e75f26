"""The token blocks of prompts that came as text, from the events of the engines that computed them.

Nothing here tokenises. But an engine tells the token ids of the blocks that it stores, and the name that
the request had for it (`session_id`, vLLM 0.32 and later). So the proxy names each text that it sends by
the hash of its last full block of text; see `named`. What comes back under that name are the blocks of
that text, whatever made them: a chat template, tools, images, an adapter, a cache salt. The next turn of
a conversation begins with the same text, and so, up to there, with the same blocks of tokens.

How many tokens a part of a text has is interpolated: the rest is exact.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from msgspec import Struct

# Of tokens, that are remembered in all prompts, and what a block of text counts beside these: 12 MB.
_MOST_BLOCKS = 1 << 20
_TEXT_BLOCK = 16
# Blocks of text on their way to engines that are remembered.
_MOST_SENT = 1 << 17
# The length of a text is told in so many parts of a block.
_PARTS = 64
_NAME = re.compile(r"br-([0-9a-f]{1,16})-([0-9a-f]{1,4})-([0-9a-f]{1,10})")


def named(blocks: tuple[int, ...], length: float) -> str:
    """Return the name of a prompt of at least one full block, of `length` blocks in all."""
    return f"br-{blocks[-1]:x}-{len(blocks):x}-{round(length * _PARTS):x}"


class _Prompt(Struct):
    """What is known of a text.

    Attributes:
        texts: The hashes of its beginnings that are known by it.
        tokens: The proxy's hashes of its blocks of tokens.
        share: What part of it one block of text is.
    """

    texts: tuple[int, ...]
    tokens: "array[int]"
    share: float

    @property
    def weight(self) -> int:
        return len(self.tokens) + _TEXT_BLOCK * len(self.texts)


class TextPrompts:
    """The latest texts whose blocks of tokens are known.

    Args:
        most: How many blocks are remembered.
    """

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._most, self._weight = most, 0
        # By the hash of the last full block of text, those used last behind.
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        # By the hash of any beginning: which text knows it, and how many blocks it has.
        self._beginnings: dict[int, tuple[int, int]] = {}
        self._sent: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._sent_blocks = 0

    def sent(self, texts: tuple[int, ...]) -> None:
        """Note the blocks of a text that goes to an engine, which will tell its tokens."""
        self._sent_blocks += len(texts) - len(self._sent.pop(texts[-1], ()))
        self._sent[texts[-1]] = texts
        while self._sent_blocks > _MOST_SENT:
            _, oldest = self._sent.popitem(last=False)
            self._sent_blocks -= len(oldest)

    def tokens(self, texts: tuple[int, ...]) -> "array[int]":
        """Return the blocks of tokens that a text surely begins with, as far as they are known."""
        for text in reversed(texts):
            found = self._beginnings.get(text)
            if found is not None:
                end, blocks = found
                prompt = self._prompts[end]
                self._prompts.move_to_end(end)
                return prompt.tokens[: int(len(prompt.tokens) * min(1.0, blocks * prompt.share))]
        return array("Q")

    def told(
        self, name: str, before: int, tokens: Iterable[int], ancestors: Callable[[], "array[int]"]
    ) -> None:
        """Note that an engine has stored consecutive blocks of a prompt.

        Args:
            name: What the prompt is called there; ignored if it is not one of `named`.
            before: The proxy's hash of the block before them; 0 if they begin the prompt.
            tokens: The proxy's hashes of the blocks.
            ancestors: Returns all blocks up to `before`; empty if they are not known.
        """
        match = _NAME.fullmatch(name)
        stored = array("Q", tokens)
        if match is None or not stored:
            return
        end, count, parts = (int(part, 16) for part in match.groups())
        if not 0 < _PARTS * count <= parts:
            return
        old = self._prompts.get(end)
        if old is not None and old.tokens[-1] == before:
            old.tokens += stored  # The next part of it.
            old.share = _PARTS / parts
            self._weight += len(stored)
            self._shrink()
            return
        texts = self._sent.get(end, (end,))
        count = len(texts) if end in self._sent else count
        known = old.tokens if old is not None else self.tokens(texts)
        if stored[-1] in known and old is not None:
            return  # From another engine, or of a part that was dropped.
        if before:
            found = before in known
            known = known[: known.index(before) + 1] if found else ancestors()
            if not known:
                return
            stored = known + stored
        self._keep(end, count, _Prompt(texts, stored, _PARTS / parts))

    def _keep(self, end: int, count: int, prompt: _Prompt) -> None:
        self._drop(end)
        first = count - len(prompt.texts) + 1
        for number, text in enumerate(prompt.texts, first):
            # An earlier turn of the same conversation.
            earlier = self._prompts.get(text)
            if earlier is not None and len(earlier.tokens) <= len(prompt.tokens):
                self._drop(text)
            self._beginnings[text] = end, number
        self._prompts[end] = prompt
        self._weight += prompt.weight
        self._shrink()

    def _shrink(self) -> None:
        while self._weight > self._most and self._prompts:
            self._drop(next(iter(self._prompts)))

    def _drop(self, end: int) -> None:
        prompt = self._prompts.pop(end, None)
        if prompt is None:
            return
        self._weight -= prompt.weight
        for text in prompt.texts:
            if self._beginnings.get(text, (None, 0))[0] == end:
                del self._beginnings[text]
