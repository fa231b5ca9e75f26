"""Which requests of a trace are turns of one conversation, by the blocks of their prompts.

A further turn's prompt has the prompt and the answer of the turn before it: its first blocks are the
full blocks of that prompt, and it is longer by the answer at least. Where several prompts end at the
same full block, that is the end of something that conversations share, a system prompt for example, and
ends no turn. Of what a request may continue it continues the longest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from balanceroute.traces.mooncake import BLOCK_TOKENS
from balanceroute.traces.record import TraceRequest


def with_sessions(
    requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS
) -> list[TraceRequest]:
    """Return the requests, each with the name of its conversation.

    Args:
        requests: By arrival. One that has a name keeps it, and continues no other.
        block_tokens: Tokens of a block.
    """
    # A block's id says all that comes before it, too.
    ends = [
        request.hash_ids[full - 1]
        if (full := min(request.prompt_tokens // block_tokens, len(request.hash_ids)))
        else None
        for request in requests
    ]
    prompts = Counter(ends)
    latest: dict[int, TraceRequest] = {}
    named: list[TraceRequest] = []
    for number, (request, end) in enumerate(zip(requests, ends, strict=True)):
        session = request.session
        if not session:
            before = (latest.get(block) for block in reversed(request.hash_ids))
            found = next((one for one in before if one and _continues(request, one)), None)
            session = str(number) if found is None else found.session
        named.append(replace(request, session=session))
        if end is not None and prompts[end] == 1:
            latest[end] = named[-1]
    return named


def _continues(request: TraceRequest, before: TraceRequest) -> bool:
    return before.prompt_tokens + before.output_tokens <= request.prompt_tokens
