"""The requests that a replay sends: which of a trace, when, and with what lengths."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.service_levels import Group
from balanceroute.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send.

    Attributes:
        number: Its place in the whole trace, from 0; it decides the prompt's words.
        arrival_ns: When it arrives in the trace.
        prompt_tokens: Length of the prompt, at least 1.
        output_tokens: Length of the answer without a limit, at least 1.
        hash_ids: Ids of the prompt's blocks; empty if the trace has none.
        text: The prompt itself, where it is given; None to build it from words.
        max_tokens: The limit that the client sets, where lengths are hidden; None for none.
        tenant: Whose it is; "" for nobody's.
        level: Its class, of which the lowest goes first.
        deadline_ns: How long after it is sent its first token is due; None for no deadline.
        session: The conversation that it is a turn of; empty for none.
    """

    number: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    text: str | None = None
    max_tokens: int | None = None
    tenant: str = ""
    level: int = 0
    deadline_ns: int | None = None
    session: str = ""

    @property
    def group(self) -> Group:
        """Return its tenant and class."""
        return Group(self.tenant, self.level)

    def name(self, prefix: str) -> str:
        """Return its id, under a prefix of the replay."""
        return f"{prefix}-{self.number}"

    @property
    def answer_tokens(self) -> int:
        """Return the length of the answer, cut at the limit."""
        return _capped(self.output_tokens, self.max_tokens)


def plan(
    trace: Sequence[TraceRequest],
    *,
    skip: int = 0,
    count: int | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[PlannedRequest]:
    """Choose the requests to send, in order of arrival.

    Requests without output, which failed when they were recorded, are left out; a prompt of no
    tokens is taken as one token. Longer prompts and answers than the limits are cut.

    Raises:
        ConfigError: Nothing is left to send.
    """
    end = None if count is None else skip + count
    chosen = islice(enumerate(trace), skip, end)
    planned = [
        PlannedRequest(
            number=number,
            arrival_ns=request.arrival_ns,
            prompt_tokens=_capped(max(1, request.prompt_tokens), max_prompt_tokens),
            output_tokens=_capped(request.output_tokens, max_output_tokens),
            hash_ids=request.hash_ids,
            tenant=request.tenant,
            level=request.level,
            deadline_ns=request.deadline_ns,
            session=request.session,
        )
        for number, request in chosen
        if request.output_tokens
    ]
    if not planned:
        raise ConfigError(
            f"no request to send: the trace has {len(trace)}, {skip} skipped, "
            "those without output left out"
        )
    return planned


def due_s(requests: Iterable[PlannedRequest], *, speed: float) -> list[float]:
    """Return when each request is due, in seconds from the first.

    Args:
        requests: In order of arrival.
        speed: The trace's times are divided by this.
    """
    times_ns = [request.arrival_ns for request in requests]
    return [(time_ns - times_ns[0]) / 1e9 / speed for time_ns in times_ns]


def _capped(tokens: int, limit: int | None) -> int:
    return tokens if limit is None else min(tokens, limit)
