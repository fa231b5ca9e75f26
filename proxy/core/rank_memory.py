"""Which rank has the beginning of a prompt, from the prompts that the ranks were given.

A beginning is known by its blocks. Of a conversation that its client names, the rank of its latest turn is
known too: clients may write earlier turns differently, and engines take them for the same.
"""

from collections import defaultdict

from balanceroute.proxy.core.events import RankId, Ticket
from balanceroute.proxy.core.prefill.block_index import BlockIndex, block_keys

# A million tokens in blocks of 16, more than most ranks have room for.
_BLOCKS = 1 << 16
_SESSIONS = 1 << 16
# Misses in a row that may be chance: a first token is late also after another request's prompt.
_CHANCE = 3
# Each further one makes it so many times longer until a rank is relied on again.
_PATIENCE = 4
_MOST_MISSES = 8


class RankMemory:
    """The blocks of each rank, the latest ones."""

    def __init__(self) -> None:
        self._indices: defaultdict[RankId, BlockIndex] = defaultdict(lambda: BlockIndex(_BLOCKS))
        # By session: the rank of its latest turn and the tokens of that; None if it lacked them.
        self._sessions: dict[int, tuple[RankId, int] | None] = {}
        # In a row, and requests for which nothing is expected since: ranks may have no prefix caches.
        self._misses = self._skips = 0

    def expect(self, ticket: Ticket) -> dict[RankId, int]:
        """Return the ranks that should have a beginning of a prompt, and its tokens."""
        # The last token is always computed: its output is the answer's first token.
        most = ticket.prompt_tokens - 1
        found: dict[RankId, int] = {}
        if ticket.blocks:
            keys = block_keys(ticket.blocks).tolist()
            for rank, index in self._indices.items():
                known, _ = index.leading(keys)
                if known:
                    found[rank] = min(round(known * ticket.block_tokens), most)
        session = self._sessions.get(ticket.session)
        if session is not None:
            rank, tokens = session
            found[rank] = max(found.get(rank, 0), min(tokens, most))
        if found and self._skips:
            self._skips -= 1
            return {}
        return found

    def add(self, ticket: Ticket, rank: RankId) -> None:
        """Note that a rank gets a request, and so has its blocks soon."""
        if ticket.blocks:
            self._indices[rank].add(block_keys(ticket.blocks))
        session = ticket.session
        if not session:
            return
        # The latest ones last; one that lacked what was expected once is not relied on again.
        kept = self._sessions.pop(session, (rank, 0))
        self._sessions[session] = None if kept is None else (rank, ticket.prompt_tokens)
        if len(self._sessions) > _SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def had(self) -> None:
        """Note that a rank had what was expected."""
        self._misses = 0

    def missed(self, ticket: Ticket, rank: RankId) -> None:
        """Note that a rank had to compute what it was expected to have."""
        self._misses = min(self._misses + 1, _MOST_MISSES)
        if self._misses > _CHANCE:
            self._skips = _PATIENCE ** (self._misses - _CHANCE)
        if ticket.session:
            # Perhaps the client wrote the earlier turns in another way.
            self._sessions[ticket.session] = None
        else:
            self.forget(rank)

    def forget(self, rank: RankId) -> None:
        """Note that a rank may have lost what it had."""
        self._indices.pop(rank, None)
        sessions = self._sessions
        for session in [one for one, last in sessions.items() if last and last[0] == rank]:
            del sessions[session]
