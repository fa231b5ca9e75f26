"""Which rank has the beginning of a prompt: from the prompts that ranks got, or from their own events.

A rank keeps the blocks of a prompt, also of a KV cache that it pulled. It drops the least recently used
ones first, and of one prompt the last ones first; `RankMemory` does the same. One table gives the ranks of
each block, as the bits of a number, so that one lookup of a prompt serves all ranks. For a conversation
that its client names, `RankMemory` also knows the rank of the latest turn: clients may write earlier turns
differently, which engines read as the same.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from balanceroute.proxy.core.events import RankId, Ticket
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge
from balanceroute.proxy.core.waiting import Kept, PoolEntry

# Blocks of each rank. Of smaller blocks the last one in so many tokens stands for all of them. That is two
# million tokens, more than most ranks have room for, at some 150 bytes a block.
_BLOCKS = 1 << 13
_BLOCK_TOKENS = 256
_SESSIONS = 1 << 16
# Admissions after which `Keeping` looks a waiting request up again.
_LASTS = 32
# Misses in a row that may be chance: a first token is late also after another request's prompt.
_CHANCE = 3
# Each further miss makes it so many times longer until the scheduler relies on ranks again.
_PATIENCE = 4
_MOST_MISSES = 8


class _Turn(NamedTuple):
    rank: RankId
    tokens: int  # Its prompt, and its answer once that has ended.
    added: int  # `_Held.added` until then.


@dataclass(slots=True)
class _Held:
    # With the tokens that each stands for; the least recently used first.
    blocks: OrderedDict[int, float] = field(default_factory=OrderedDict)
    tokens: float = 0.0  # Of all of them.
    added: int = 0  # Tokens of prompts that it got and lacked, since its first request.


class RankMemory:
    """The blocks of all ranks.

    Args:
        rank_tokens: Returns the KV tokens that a rank keeps; None if that is unknown.
        engine_blocks: The blocks that ranks report, by rank; None if the proxy does not listen.
    """

    def __init__(
        self,
        rank_tokens: Callable[[], int | None] = lambda: None,
        engine_blocks: EngineBlocks | None = None,
    ) -> None:
        self.kept_tokens = 0  # Tokens of prompts that their ranks should have had, of all requests.
        self._rank_tokens = rank_tokens
        self._engine_blocks = engine_blocks
        self._ranks = 0  # One more than the highest rank that got a request.
        self._held: dict[RankId, _Held] = {}
        self._ranks_of: dict[int, int] = {}  # By block: 1 << rank of each that has it.
        self._admissions = 0
        # None if the rank lacked it.
        self._sessions: dict[int, _Turn | None] = {}
        # Misses in a row, and for how many more requests it expects nothing: ranks may have no prefix caches.
        self._misses = self._skips = 0

    def kept(self, ticket: Ticket) -> dict[RankId, int]:
        """Return the ranks that should have a beginning of a prompt, with its length in tokens."""
        ranks = self._ranks
        if self._engine_blocks is not None:
            ranks = max(ranks, 1 + max(self._engine_blocks.engines, default=-1))
        return {RankId(n): tokens for n, tokens in enumerate(self.row(ticket, ranks)) if tokens}

    def row(self, ticket: Ticket, ranks: int) -> list[int]:
        """Return the tokens of a prompt's beginning that each of so many ranks should have."""
        # The last token is always computed: its output is the answer's first token.
        most = ticket.prompt_tokens - 1
        row = self._given(ticket, ranks)
        if self._engine_blocks is not None:
            self._correct(row, self._engine_blocks, ticket)
        turn = self._sessions.get(ticket.session)
        if turn is not None and turn.rank < ranks and self._remembers(turn):
            row[turn.rank] = max(row[turn.rank], min(turn.tokens, most))
        return row

    def keeping(self, ranks: int, open_ranks: int) -> "Keeping":
        """Return a view on the G ranks, of which `open_ranks` are open, for one round."""
        return Keeping(self, ranks, open_ranks, self._admissions)

    def expect(self, ticket: Ticket) -> dict[RankId, int]:
        """Return `kept`, or nothing for a while after several misses in a row."""
        found = self.kept(ticket)
        if found and self._skips:
            self._skips -= 1
            return {}
        return found

    def add(self, ticket: Ticket, rank: RankId) -> None:
        """Note that a rank gets a request, and so has its blocks soon."""
        self._admissions += 1
        self._ranks = max(self._ranks, rank + 1)
        held = self._held.setdefault(rank, _Held())
        blocks, tokens = _sampled(ticket)
        ranks_of, bit, order = self._ranks_of, 1 << rank, held.blocks
        new = 0
        # From the end, as engines free them: of a long prompt the beginning is kept longest.
        for block in reversed(blocks):
            if block in order:
                order.move_to_end(block)
                continue
            order[block] = tokens
            ranks_of[block] = ranks_of.get(block, 0) | bit
            new += 1
        kept = min(round((len(blocks) - new) * tokens), ticket.prompt_tokens)
        self.kept_tokens += kept
        held.tokens += new * tokens
        held.added += ticket.prompt_tokens - kept
        self._drop_oldest(held, bit)
        if ticket.session:
            self._remember(ticket, _Turn(rank, ticket.prompt_tokens, held.added))

    def ended(self, ticket: Ticket, rank: RankId, tokens: int) -> None:
        """Note that a request has ended on a rank, with so many tokens in all."""
        turn = self._sessions.get(ticket.session)
        if turn is not None and turn.rank == rank and turn.tokens == ticket.prompt_tokens:
            self._sessions[ticket.session] = turn._replace(tokens=tokens)

    def had(self) -> None:
        self._misses = 0

    def missed(self, ticket: Ticket, rank: RankId) -> None:
        """Note that a rank had to compute the expected tokens."""
        self._misses = min(self._misses + 1, _MOST_MISSES)
        if self._misses > _CHANCE:
            self._skips = _PATIENCE ** (self._misses - _CHANCE)
        if ticket.session:
            # Perhaps the client wrote the earlier turns in another way.
            self._sessions[ticket.session] = None
        else:
            self.forget(rank)

    def forget(self, rank: RankId) -> None:
        """Note that a rank may have lost all blocks."""
        held = self._held.pop(rank, None)
        if held is not None:
            for block in held.blocks:
                self._clear(block, 1 << rank)
        sessions = self._sessions
        for session in [one for one, last in sessions.items() if last and last.rank == rank]:
            del sessions[session]

    def _given(self, ticket: Ticket, ranks: int) -> list[int]:
        """Return the tokens that each rank should have, by the requests that it got."""
        blocks, tokens = _sampled(ticket)
        ranks_of, most = self._ranks_of, ticket.prompt_tokens - 1
        missing = (1 << ranks) - 1
        having = ranks_of.get(blocks[0], 0) & missing if blocks else 0
        missing ^= having
        levels, known = [(missing, 0)], 0
        while having:
            # They all have one block more than `known`. By binary search: how many do all of them have?
            least, end = known + 1, len(blocks)
            while least < end:
                middle = (least + end) // 2
                if ranks_of.get(blocks[middle], 0) & having == having:
                    least = middle + 1
                else:
                    end = middle
            known = least
            further = ranks_of.get(blocks[known], 0) & having if known < len(blocks) else 0
            levels.append((having ^ further, min(round(known * tokens), most)))
            having = further
        # Most ranks have the same: nothing, or the common beginning of many prompts.
        levels.sort(key=_size)
        row = [levels.pop()[1]] * ranks
        for some, count in levels:
            left = some
            while left:
                last = left & -left
                row[last.bit_length() - 1] = count
                left ^= last
        return row

    def _correct(self, row: list[int], engine_blocks: EngineBlocks, ticket: Ticket) -> None:
        """Replace the estimates of ranks that report their blocks."""
        of_tokens, blocks = ticket.token_blocks, engine_blocks.beginning(ticket)
        for rank in engine_blocks.engines if blocks else ():
            if rank >= len(row):
                continue
            there = engine_blocks.leading(rank, blocks)
            tokens = min(there * engine_blocks.block_tokens, ticket.prompt_tokens - 1)
            # Of a text, blocks behind the part whose tokens are known may be there too.
            all_known = of_tokens or there < len(blocks)
            if not (all_known and engine_blocks.knowledge(rank) is Knowledge.ALL):
                tokens = max(tokens, row[rank])
            row[rank] = tokens

    def _remembers(self, turn: _Turn) -> bool:
        """Return whether a rank has room for a turn and for all that it got since."""
        room, held = self._rank_tokens(), self._held.get(turn.rank)
        if room is None:
            return True
        return held is not None and held.added - turn.added + turn.tokens <= room

    def _remember(self, ticket: Ticket, turn: _Turn) -> None:
        # The latest ones last. A conversation whose rank lacked it once stays None.
        session = ticket.session
        before = self._sessions.pop(session, turn)
        self._sessions[session] = None if before is None else turn
        if len(self._sessions) > _SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def _drop_oldest(self, held: _Held, bit: int) -> None:
        order, room = held.blocks, self._rank_tokens()
        while len(order) > _BLOCKS or (room is not None and held.tokens > room and order):
            block, tokens = order.popitem(last=False)
            held.tokens -= tokens
            self._clear(block, bit)

    def _clear(self, block: int, bit: int) -> None:
        left = self._ranks_of[block] & ~bit
        if left:
            self._ranks_of[block] = left
        else:
            del self._ranks_of[block]


class Keeping(NamedTuple):
    """How much of the prompts of waiting requests is on the ranks, during a round."""

    memory: RankMemory
    ranks: int  # G.
    open_ranks: int  # How many of them are open.
    admissions: int  # So far; see `Kept.until`.

    def of(self, entry: PoolEntry) -> Kept:
        """Return how much of a waiting request's prompt is on the ranks."""
        known = entry.kept
        if known is None or known.until <= self.admissions:
            tokens = self.memory.row(entry.ticket, self.ranks)
            mean = sum(tokens) / max(1, self.open_ranks)
            known = entry.kept = Kept(tokens, mean, self.admissions + _LASTS)
        return known


def _size(level: tuple[int, int]) -> int:
    return level[0].bit_count()


def _sampled(ticket: Ticket) -> tuple[tuple[int, ...], float]:
    """Return the blocks of a prompt that are remembered, and the tokens that each stands for."""
    blocks, tokens = ticket.blocks, ticket.block_tokens
    # Blocks of text are never as small, and their tokens are an estimate that varies.
    if ticket.token_blocks and 0 < tokens < _BLOCK_TOKENS:
        every = round(_BLOCK_TOKENS / tokens)
        return blocks[every - 1 :: every], every * tokens
    return blocks, tokens
