"""What recurring requests have in common, as 64-bit hashes: the keys that predictors learn by.

The first key is the whole request's: every member that can change how long one sequence of its answer
gets, as it stands in the body. The other keys are ever shorter beginnings of its prompt, with what comes
before the prompt: a conversation up to its last message, up to the first turn, its system prompt
alone; or the first 4,096, 1,024 and 256 characters of a text. Of messages of more than 128 KiB, what
is between the first four and the last one counts as it stands in the body. So a key is the more
specific the earlier it comes, and requests of one application share at least the last ones.

No key reveals a prompt: the proxy keeps and writes only a hash of 64 bits.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.prefill.engine_blocks import named, token_hashes
from balanceroute.proxy.live.openai.body import SMALL_BYTES, RequestBody
from balanceroute.proxy.live.openai.json_scan import HEADS, PromptSummary, decoded_beginning
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, PROMPT_MEMBER, TAKES_IDS, Api

# Where a text's beginnings end, in characters, and those of a prompt of token ids, in tokens.
CHARACTERS = (256, 1024, 4096)
TOKENS = (64, 256, 1024)

# Members that change nothing in how long a sequence gets: the form of the answer, the sender, what the
# proxy drops. Of several sequences each counts by itself, and a seed is a draw from what the rest of
# the request makes likely. All other members may matter, also unknown ones.
_IRRELEVANT = INTERNAL_FIELDS | {
    "best_of",
    "cache_salt",
    "echo",
    "logprobs",
    "metadata",
    "n",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "seed",
    "service_tier",
    "session_id",
    "store",
    "stream",
    "stream_options",
    "top_logprobs",
    "user",
}
# What a chat template puts before the messages, or what makes another kind of answer of the same
# messages, thinking aloud for example. Sorted.
FRONT = (
    "chat_template",
    "chat_template_kwargs",
    "functions",
    "instructions",
    "model",
    "reasoning",
    "reasoning_effort",
    "system",
    "thinking",
    "tools",
)
_SYSTEM_ROLES = frozenset({"system", "developer"})
_BYTES = 8
_ARRAY = b"["[0]
# Bytes that hold the longest beginning: a character takes at most 12, as two escapes.
_COVERED = 12 * (CHARACTERS[-1] + 2)
_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def prompt_keys(api: Api, body: RequestBody) -> tuple[int, ...]:
    """Return the keys of a request, the most specific first; time is linear in its body.

    Returns:
        At least one key and at most five, each of 64 bits.
    """
    keys = [_hash_of_members(api, body, sorted(body.values.keys() - _IRRELEVANT)).digest()]
    beginning = _hash_of_members(api, body, FRONT)
    beginning.update(b"\0\0")
    ends: list[bytes] = []
    try:
        for piece in _pieces(api, body):
            beginning.update(piece)
            ends.append(beginning.digest())
    except RecursionError:
        ends.clear()  # Nested too deeply to be written again; no two such requests are expected.
    return tuple(int.from_bytes(key) for key in (*keys, *reversed(ends)))


def _hash_of_members(api: Api, body: RequestBody, names: Iterable[str]) -> blake2b:
    """Return a hash of the members that are given, for the caller to update further."""
    hasher = blake2b(api.value.encode(), digest_size=_BYTES)
    for name in names:
        if body.is_given(name):
            # No JSON text holds a NUL, so no two sequences of members are one text.
            hasher.update(b"\0")
            hasher.update(body.fingerprint(name))
    return hasher


def _pieces(api: Api, body: RequestBody) -> Iterator[bytes]:
    """Yield the prompt from its start, cut where each beginning ends."""
    if body.is_given("system") or body.is_given("instructions"):
        yield b""  # Before the messages stands a system prompt.
    name = PROMPT_MEMBER[api]
    large = body.large_value(name)
    if large is not None and api not in TAKES_IDS and large[0] == _ARRAY:
        yield from _large_message_pieces(body, name)
        return
    prompt = body.values.get(name) if large is None else _beginning(large, body.summary(name))
    if api in TAKES_IDS and isinstance(prompt, list) and len(prompt) == 1:
        # A list of one prompt is that prompt. One token id is shorter than any beginning.
        prompt = prompt[0]
    if isinstance(prompt, str):
        cuts = [0, *(cut for cut in CHARACTERS if cut < len(prompt))]
        for begin, end in pairwise(cuts):
            yield _encoded(prompt[begin:end])
    elif not isinstance(prompt, list):
        return
    elif api in TAKES_IDS:
        yield from _token_pieces(prompt)
    else:
        yield from _message_pieces(prompt)


def _token_pieces(prompt: list[int]) -> Iterator[bytes]:
    cuts = [0, *(cut for cut in TOKENS if cut < len(prompt))]
    for begin, end in pairwise(cuts):
        try:
            yield array("q", prompt[begin:end]).tobytes()
        except (TypeError, OverflowError):
            return  # Several prompts, or ids that no engine takes.


def _message_pieces(messages: list[object]) -> Iterator[bytes]:
    system = 0
    while system < len(messages) and _role(messages[system]) in _SYSTEM_ROLES:
        system += 1
    for begin, end in _stretches(system, len(messages)):
        yield b"".join(map(_message, messages[begin:end]))


def _stretches(system: int, count: int) -> Iterable[tuple[int, int]]:
    """Return where messages are cut: behind those of the system, the first turn, all but the last."""
    cuts = {system, system + 1, count - 1}
    return pairwise([0, *sorted(cut for cut in cuts if 0 < cut <= count)])


def _beginning(value: memoryview, summary: PromptSummary) -> object:
    """Return so much of a large prompt as its keys cover, as if it ended there."""
    text = bytes(value[:_COVERED])
    if summary.elements == 1:
        text = text[1:].lstrip()
    if text.startswith(b'"'):
        return decoded_beginning(text)
    try:
        return json.loads(text.rpartition(b",")[0] + b"]")
    except ValueError:
        return None  # Several texts.


def _large_message_pieces(body: RequestBody, name: str) -> Iterator[bytes]:
    """Yield the same of messages that are too large to be decoded: the long middle as it stands."""
    summary = body.summary(name)
    heads = [_message_in(body, begin, end) for begin, end in summary.heads]
    system = 0
    while system < len(heads) and heads[system][0] in _SYSTEM_ROLES:
        system += 1
    if summary.objects < summary.elements or system == HEADS:
        return
    for begin, end in _stretches(system, summary.elements):
        if end <= len(heads):
            yield b"".join(piece for _, piece in heads[begin:end])
        else:
            yield b"".join(piece for _, piece in heads[begin:]) + body.digest(*summary.middle)


def _message_in(body: RequestBody, begin: int, end: int) -> tuple[object, bytes]:
    """Return the role of a message, and what of it goes into the keys."""
    if end - begin > SMALL_BYTES:
        return None, body.digest(begin, end)
    message = json.loads(bytes(body.part(begin, end)))
    return _role(message), _message(message)


def _role(message: object) -> object:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else None


def _message(message: object) -> bytes:
    if isinstance(message, dict) and len(message) == 2:
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            # Nearly every message; a third of the time, and none of the escapes, of the general way.
            return _encoded(f"{len(role)} {len(content)} {role}{content}")
    return _encoded(f"{_dump(message)}\n")


def _encoded(text: str) -> bytes:
    # JSON can spell half of a surrogate pair, which UTF-8 cannot.
    return text.encode("utf-8", "surrogatepass")


# Hashes of a prompt's blocks, by which a prefiller is known to have its beginning already.
#
# No tokeniser is at hand, so a block is a piece of the prompt's JSON text of fixed length; or
# where prefillers report their blocks, and the prompt is token ids, a piece of so many. Two
# prompts with equal hashes have equal text up to there, and equal members that a chat template
# puts before it. A further turn of a conversation repeats the text of the turns before it, if its
# client writes JSON in the same way each time; else it counts as another prompt.

# About 500 tokens of English text.
BLOCK_BYTES = 2_048
# Of very long prompts only the beginning is hashed: a million bytes take a millisecond or two.
_MOST_BLOCKS = 512
_MOST_BYTES = _MOST_BLOCKS * BLOCK_BYTES
_MASK = (1 << 63) - 1
# Engines keep the caches of different salts apart.
_BEFORE = (*FRONT, "cache_salt")
# What makes engines compute or keep other blocks than those of the ids.
_NOT_ALONE = ("cache_salt", "prompt_embeds", "truncate_prompt_tokens")
_FLAT = msgspec.json.Decoder(list[int])
_NESTED = msgspec.json.Decoder(list[list[int]])


class PromptBlocks(NamedTuple):
    """The full blocks of a prompt."""

    hashes: tuple[int, ...] = ()  # Of each and of all before it too, below 2**63.
    share: float = 0.0  # What part of the prompt each is; 0 if there is none.
    of_tokens: bool = False  # Whether they are blocks of token ids; see `token_hashes`.

    def of(self, ticket: Ticket) -> Ticket:
        return structs.replace(
            ticket,
            blocks=self.hashes,
            block_tokens=self.share * ticket.prompt_tokens,
            token_blocks=self.of_tokens,
        )


def prompt_blocks(api: Api, body: RequestBody, token_block: int = 0) -> PromptBlocks:
    """Return the blocks of a prompt; time is linear in it.

    Where the prompt is token ids, a block is `token_block` of them, unless that is 0.
    """
    if token_block and api in TAKES_IDS:
        found = _token_blocks(body, PROMPT_MEMBER[api], token_block)
        if found is not None:
            return found
    text = body.value_text(PROMPT_MEMBER[api])
    full = min(len(text) // BLOCK_BYTES, _MOST_BLOCKS)
    if not full:
        return PromptBlocks()
    hasher = _hash_of_members(api, body, _BEFORE)
    hasher.update(b"\0\0")
    hashes = []
    for begin in range(0, full * BLOCK_BYTES, BLOCK_BYTES):
        hasher.update(text[begin : begin + BLOCK_BYTES])
        hashes.append(int.from_bytes(hasher.digest()) & _MASK)
    return PromptBlocks(tuple(hashes), BLOCK_BYTES / len(text))


def prompt_name(api: Api, body: RequestBody, ticket: Ticket) -> bytes:
    """Return the header line by which an engine's KV cache events name a prompt; empty if it needs none.

    Source: https://github.com/vllm-project/vllm, vllm/entrypoints/generate/base/serving.py at v0.32.0.
    """
    if not ticket.blocks or ticket.token_blocks:
        return b""
    length = len(body.value_text(PROMPT_MEMBER[api])) / BLOCK_BYTES
    return b"x-session-id: %b\r\n" % named(ticket.blocks, length).encode()


def _token_blocks(body: RequestBody, name: str, token_block: int) -> PromptBlocks | None:
    """Return the blocks of one prompt of token ids; None if it is something else."""
    summary = body.summary(name)
    if summary.elements == summary.integers > 0:
        count, ids_in = summary.integers, _FLAT.decode
    elif summary.elements == summary.arrays == 1:
        count, ids_in = summary.inner, lambda text: _NESTED.decode(text)[0]
    else:
        return None
    if any(map(body.is_given, _NOT_ALONE)):
        return None
    text: bytes | memoryview = body.value_text(name)
    if len(text) > _MOST_BYTES:
        closed = b"]" * (1 if summary.integers else 2)
        text = bytes(text[:_MOST_BYTES]).rpartition(b",")[0] + closed
    try:
        ids = np.frombuffer(array("q", ids_in(text)), np.int64)
    except (msgspec.MsgspecError, OverflowError):
        return None  # Ids that no engine takes.
    if not ids.size:
        return None
    return PromptBlocks(token_hashes(ids, token_block), token_block / count, True)
