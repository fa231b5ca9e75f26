"""The engines behind the proxy: prefillers and decode ranks, with their addresses and their state."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count
from typing import TYPE_CHECKING

from msgspec import Struct

from balanceroute.proxy.core.events import Eligible, PrefillerId, RankId, RequestId
from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks


# Whether the token that a prefiller says is the first of the answer.
#
# A prefiller of a hybrid model (Mamba layers, compressed KV caches) or with draft layers leaves
# the last tokens of a prompt to the decode rank, and says what would follow without them. NIXL
# reports it; with other connectors only a comparison with the ranks' tokens shows it, so there
# the comparison comes before any trust.

_log = logging.getLogger(__name__)
# Near ties that two engines resolve differently are far rarer.
_LEAST_DIFFERING = 8
_MOST_SHARE = 0.25
# What a prefiller of a hybrid model says is sometimes right by chance, and hardly so often in a row.
_PROBATION = 16


class FirstTokenTrust:
    """The first tokens of one prefiller, since it started.

    Args:
        of: Names its process; None while that is unknown.
        partial: Whether it left the end of its latest prompt to the rank, as far as it reports.
    """

    __slots__ = ("_agreed", "_compared", "_differing", "of", "partial")

    def __init__(self, of: object = None, *, partial: bool = False) -> None:
        self.of = of
        self.partial = partial
        self._compared = 0
        self._differing = 0
        self._agreed = 0  # In a row; those that clients got early are not counted.

    @property
    def credible(self) -> bool:
        return not self.partial and not self._differ

    @property
    def proven(self) -> bool:
        """Whether the ranks have said the same for long enough."""
        return self._agreed >= _PROBATION

    @property
    def _differ(self) -> bool:
        return self._differing >= max(_LEAST_DIFFERING, _MOST_SHARE * self._compared)

    def count(self) -> None:
        self._compared += 1

    def agree(self) -> None:
        """Note that a rank said the same."""
        self._agreed += 1

    def differ(self, prefiller: str) -> None:
        """Note that a rank said another one."""
        differed = self._differ
        self._differing += 1
        self._agreed = 0
        if self._differ and not differed:
            fields = {
                "prefiller": prefiller,
                "differing": self._differing,
                "compared": self._compared,
            }
            _log.warning("first tokens differ: they wait for ranks", extra={"fields": fields})

    def note(self, prefiller: str, *, partial: bool) -> None:
        """Note whether it left the end of a prompt to the rank."""
        if partial and not self.partial:
            fields = {"prefiller": prefiller}
            message = "a prefiller leaves the end of prompts to ranks: first tokens are theirs"
            _log.info(message, extra={"fields": fields})
        self.partial = partial


class Role(Enum):
    """The role of an instance."""

    # Enum's own hash is Python code, and every request looks its engines up.
    __hash__ = object.__hash__

    PREFILL = "prefill"
    DECODE = "decode"


PREFILL_ROLE, DECODE_ROLE = Role.PREFILL, Role.DECODE


class Status(Enum):
    """Whether an instance may be used."""

    UP = "up"
    QUARANTINED = "quarantined"  # It fails; health probes bring it back.
    DRAINING = "draining"  # Takes nothing new, on an operator's word.
    REMOVED = "removed"


UP = Status.UP


class Target(Struct, frozen=True):
    """An instance as health checks and scrapes know it: ranks that share a server are one target."""

    role: Role
    url: str  # Its base URL, as in `http://10.0.0.1:8000`.


@dataclass(slots=True, eq=False)
class Prefiller:
    """One prefill instance."""

    id: PrefillerId  # Its place in the scheduler.
    name: str
    target: Target  # What health checks watch.
    endpoint: Endpoint
    # URL of its bootstrap server, for connectors that have one. Its KV caches cannot be used before
    # that has answered, so until then it takes no prefills.
    bootstrap: str | None = None
    identity: BootstrapIdentity | None = None  # The answer of the bootstrap server.
    status: Status = Status.UP
    # KV-cache use it reports, 0 to 1; 1 if the report is missing or stale.
    utilisation: float = 0.0
    crowded: bool = False  # Whether that is too much for another prefill.
    hand_offs: int = 0  # Prefills that decode ranks called for, running now.
    lost_kv: int = 0  # How often all KV caches that it had handed out were lost.
    engines: set[str] = field(default_factory=set)  # Ids of the engines seen behind its address.
    kv_trial: bool = False  # Whether its KV caches could not be pulled, and none has been since.
    probed: bool = True  # Whether its health is known; see `Health`.
    asked: bool = True  # Whether the proxy has asked what it is, if it asks; see `pairing`.
    # Whether it reports that it sleeps: it would take requests, and not serve them.
    asleep: bool = False
    # Why it fits no rank that is up; empty if it fits one, or if that is not known.
    unfit: str = ""
    # What its pages say against its place here; see `engine_facts`.
    page_doubts: tuple[str, ...] = ()
    without_kv: str = ""  # Why no rank could pull what its last prefill left; empty if one could.
    ranks: frozenset[RankId] | None = None  # The only ranks that it fits; None for all.
    # Whether it recounts the whole answer for each event.
    continuous_usage_is_expensive: bool = False
    # Whether its token is the first of the answer.
    first_tokens: FirstTokenTrust = field(default_factory=FirstTokenTrust)
    # Routes that it said not to have, and until when that is believed, by the loop's clock.
    lacks: dict[str, float] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether it is up and awake, as far as was seen, and fits a rank."""
        return self.status is UP and self.probed and not self.asleep and not self.unfit

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks against its place here."""
        if not self.without_kv:
            return self.page_doubts
        return (*self.page_doubts, f"its last prefill left no KV cache: {self.without_kv}")

    @property
    def open(self) -> bool:
        known = (self.bootstrap is None or self.identity is not None) and self.asked
        return self.usable and known and not self.crowded


def process_of(engine_id: str) -> str:
    """Return what all ids of an engine have in common; vLLM puts the data-parallel rank behind it (`_dp1`)."""
    return engine_id.rpartition("_dp")[0] or engine_id


@dataclass(slots=True, eq=False)
class Rank:
    """One data-parallel decode rank."""

    id: RankId  # Its place in the scheduler.
    name: str  # URL, with "@rank" behind it if several ranks share it.
    target: Target  # What health checks watch: its server.
    endpoint: Endpoint
    # Value of X-data-parallel-rank, or None if the rank has a URL of its own.
    header: bytes | None = None
    status: Status = Status.UP
    probed: bool = True  # Whether the health of its engine is known.
    asked: bool = True  # Whether the proxy has asked what its engine is, if it asks.
    asleep: bool = False  # Whether it reports that it sleeps.
    still: bool = False  # Whether it makes no tokens while other ranks do; see `ProgressVeto`.
    # Whether it is `still` as a rank of its data-parallel group has died; see `DpGroups`.
    doomed: bool = False
    # Whether it was `still`, and has given no token since it was opened again.
    on_trial: bool = False
    # Why it fits no prefiller that is up; empty if it fits one, or if that is not known.
    unfit: str = ""
    # What its engine's pages say against its place here; see `engine_facts`.
    page_doubts: tuple[str, ...] = ()
    # Whether its engine recounts the whole answer for each event.
    continuous_usage_is_expensive: bool = False
    lacks: dict[str, float] = field(default_factory=dict)  # See `Prefiller`.

    @property
    def usable(self) -> bool:
        """Whether it is up and awake, as far as was seen, makes tokens, and fits a prefiller."""
        known = self.status is UP and self.probed
        return known and not (self.asleep or self.still or self.unfit)

    @property
    def may_return(self) -> bool:
        """Whether it may be usable in a moment: it may end with its group, or not."""
        return self.doomed and self.status is UP

    @property
    def state(self) -> str:
        """Its status in a word, for people: `still` if it is up and makes no tokens, `doomed` with its group."""
        if self.status is not UP:
            return self.status.value
        return "doomed" if self.doomed else "still" if self.still else self.status.value

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks against its place here."""
        return self.page_doubts

    @property
    def open(self) -> bool:
        return self.usable and self.asked


_NONE_UP = "no engine of each role is up"
_NONE_FIT = f"{_NONE_UP} that fits one of the other: decode engines and prefillers"
_HOW_TO_FIT = "Start both roles with the same version, weights and flags"


class Instances:
    """All prefillers and ranks, by their numbers in the scheduler. Numbers are never used again.

    Args:
        dp_size: Ranks of a data-parallel group; None for the size by their pages.

    Attributes:
        engine_blocks: Blocks that prefillers report of their prefix caches; None if nothing follows them.
        rank_blocks: Blocks that ranks report of theirs.
        groups: The ranks that end together.
    """

    def __init__(
        self,
        engine_blocks: "EngineBlocks | None" = None,
        rank_blocks: "EngineBlocks | None" = None,
        *,
        dp_size: int | None = None,
    ) -> None:
        self.engine_blocks, self.rank_blocks = engine_blocks, rank_blocks
        self.groups = DpGroups(self, dp_size)
        self.prefillers: list[Prefiller] = []  # By PrefillerId.
        self.ranks: list[Rank] = []  # By RankId.
        # Those that are found by their targets so far: the lists grow.
        self._prefillers_of: dict[Target, list[Prefiller]] = {}
        self._ranks_of: dict[Target, list[Rank]] = {}
        self._found = [0, 0]

    def of(self, target: Target) -> list[Prefiller] | list[Rank]:
        """Return the prefillers or ranks of an instance that health checks watch, removed ones too."""
        if target.role is Role.PREFILL:
            for prefiller in self.prefillers[self._found[0] :]:
                self._prefillers_of.setdefault(prefiller.target, []).append(prefiller)
            self._found[0] = len(self.prefillers)
            return self._prefillers_of.get(target, [])
        for rank in self.ranks[self._found[1] :]:
            self._ranks_of.setdefault(rank.target, []).append(rank)
        self._found[1] = len(self.ranks)
        return self._ranks_of.get(target, [])

    def has(self, target: Target) -> bool:
        return any(one.status is not Status.REMOVED for one in self.of(target))

    def bring_back(
        self, target: Target, names: Sequence[str], endpoint: Endpoint, *, asked: bool
    ) -> bool:
        """Take back the removed prefiller or ranks at an address; return whether they are the same.

        So the numbers do not grow while engines come and go at the same addresses.

        Args:
            target: The instance.
            names: Of its prefiller or its ranks.
            endpoint: Makes the connections to it.
            asked: See `Prefiller`.
        """
        removed = self.of(target)
        if not removed or self.has(target):
            return False
        if [one.name for one in removed] != [*names]:
            removed.clear()  # Other ones take their place.
            return False
        for one in removed:
            one.endpoint, one.asked, one.status = endpoint, asked, Status.UP
            one.asleep, one.unfit, one.continuous_usage_is_expensive = False, "", False
            one.page_doubts = ()
            one.lacks.clear()
            if isinstance(one, Prefiller):
                one.identity, one.utilisation, one.crowded = None, 0.0, False
                one.kv_trial, one.first_tokens, one.without_kv = False, FirstTokenTrust(), ""
            else:
                one.still = one.on_trial = one.doomed = False
        return True

    def others_serve(self, target: Target) -> bool:
        """Return whether an instance is down while another one of its role takes requests."""
        peers = self.prefillers if target.role is Role.PREFILL else self.ranks
        return not any(one.usable for one in self.of(target)) and any(one.open for one in peers)

    def serving(self) -> list[RankId]:
        return [rank.id for rank in self.ranks if rank.status is not Status.REMOVED]

    def prefilling(self) -> list[PrefillerId]:
        return [one.id for one in self.prefillers if one.status is not Status.REMOVED]

    def up(self, among: Collection[PrefillerId] | None = None) -> list[Prefiller]:
        """Return the prefillers that are up and awake, of those in `among`; None for all."""
        up = [one for one in self.prefillers if one.status is UP and one.probed and not one.asleep]
        return up if among is None else [one for one in up if one.id in among]

    @property
    def ready(self) -> bool:
        """Whether a request could be served now: one instance of each role was probed and is up."""
        return _any_up(self.prefillers) and (
            _any_up(self.ranks) or any(rank.may_return for rank in self.ranks)
        )

    @property
    def why_none(self) -> str:
        """Why a request cannot be served, if none can: for clients."""
        either: list[Prefiller | Rank] = [*self.prefillers, *self.ranks]
        unfit = next((one.unfit for one in either if one.status is UP and one.unfit), "")
        return f"{_NONE_FIT} {unfit}. {_HOW_TO_FIT}" if unfit else _NONE_UP

    @property
    def missing(self) -> set[Role]:
        """The roles of which no instance is up."""
        return self.missing_for(None)

    @property
    def unprobed(self) -> set[Role]:
        """The roles with an instance of which nothing is known yet."""
        either: list[Prefiller | Rank] = [*self.prefillers, *self.ranks]
        return {one.target.role for one in either if one.status is UP and not one.probed}

    def missing_for(self, eligible: Eligible | None) -> set[Role]:
        """Return the roles of which no instance is up that can serve a request; None for any."""
        # Asked for every request, so it stops at the first one that will do.
        missing = set()
        if not any(
            one.usable and (eligible is None or one.id in eligible.prefillers)
            for one in self.prefillers
        ):
            missing.add(Role.PREFILL)
        if not any(
            (one.usable or one.may_return) and (eligible is None or one.id in eligible.ranks)
            for one in self.ranks
        ):
            missing.add(Role.DECODE)
        return missing


def _any_up(engines: Sequence[Prefiller | Rank]) -> bool:
    for one in engines:  # noqa: SIM110 - every request asks, and a generator costs three times this.
        if one.usable:
            return True
    return False


# Data-parallel groups of decode ranks: those that share a barrier, and end together.
#
# The ranks of a group serve a mixture of experts, and take each step together. vLLM ends all of them when one
# has died, or they wait for it for ever. So a group is one domain of failure: once a rank of it is gone, its other ranks
# are **doomed**. They get nothing, their requests go on in another group, and the proxy does not take their
# ends for deaths caused by a prompt.
#
# The settings say which ranks form a group (so many at a time, in their order), or the metrics pages do: the
# label `engine` is a rank's number in its group, so the ranks of servers that follow each other and have the
# numbers 0 to n-1 are one. If the numbers do not come out in groups of equal size, the groups are unknown, and
# each server is a domain of its own.


class DpGroups:
    """Knows the group of each rank.

    Args:
        size: Ranks of a group; None for the size by their pages.
    """

    def __init__(self, instances: Instances, size: int | None) -> None:
        self._instances = instances
        self._size = size
        self._places: list[int] = []  # With a size, the group of each rank.
        # Of ranks in their groups, as each server reports them.
        self._numbers: dict[Target, frozenset[str]] = {}
        self._learned: dict[RankId, int] = {}  # The first rank of the group of each.

    def scraped(self, target: Target, numbers: frozenset[str]) -> None:
        """Take in which ranks a decode server says it has, by their numbers in its group."""
        if self._size is None and self._numbers.get(target) != numbers:
            self._numbers[target] = numbers
            self._learn()

    def of(self, rank: Rank) -> int | None:
        """Return what names the group of a rank; None if it is in none that is known."""
        if self._size is None:
            return self._learned.get(rank.id)
        if self._size == 1:
            return None
        for one in range(len(self._places), len(self._instances.ranks)):
            self._places.append(self._first_with_room(one, self._size))
        return self._places[rank.id]

    def _first_with_room(self, rank: int, size: int) -> int:
        """Return the first group that lacks a rank: one that comes takes the place of one that was removed."""
        before = zip(self._instances.ranks[:rank], self._places, strict=True)
        there = Counter(place for one, place in before if one.status is not Status.REMOVED)
        return next(place for place in count() if there[place] < size)

    def mates(self, target: Target) -> list[Rank]:
        """Return the ranks that end with those of a server, as they are in their group."""
        own = {self.of(one) for one in self._instances.of(target) if isinstance(one, Rank)} - {None}
        return [
            rank
            for rank in self._instances.ranks
            if rank.target != target and rank.status is not Status.REMOVED and self.of(rank) in own
        ]

    def first(self, engine: Prefiller | Rank) -> Target:
        """Return the first server of those that end with an engine."""
        own = self.of(engine) if isinstance(engine, Rank) else None
        if own is None:
            return engine.target
        return next(rank.target for rank in self._instances.ranks if self.of(rank) == own)

    def ended(self, eligible: Eligible | None) -> bool:
        """Return whether all ranks that can serve a request have ended with their groups; None for any."""
        ranks = [
            rank
            for rank in self._instances.ranks
            if rank.status is not Status.REMOVED and (eligible is None or rank.id in eligible.ranks)
        ]
        return bool(ranks) and all(
            rank.status is Status.QUARANTINED and self.of(rank) is not None for rank in ranks
        )

    def _learn(self) -> None:
        """Form the groups anew, if the servers' numbers come out even."""
        servers: dict[Target, list[Rank]] = {}
        for rank in self._instances.ranks:
            if rank.status is not Status.REMOVED:
                servers.setdefault(rank.target, []).append(rank)
        groups: list[list[Target]] = []
        seen: set[str] = set()
        for target in servers:
            numbers = self._numbers.get(target)
            if numbers is None:
                return  # One has yet to report.
            if not groups or numbers & seen:
                groups.append([])
                seen = set()
            groups[-1].append(target)
            seen |= numbers
        sizes = {self._size_of(group) for group in groups}
        learned: dict[RankId, int] = {}
        if len(sizes) == 1 and None not in sizes:
            for group in groups:
                ranks = list(chain.from_iterable(servers[target] for target in group))
                if len(group) > 1:
                    learned |= dict.fromkeys((one.id for one in ranks), ranks[0].id)
        if learned != self._learned:
            self._learned = learned
            fields = {"groups": len(set(learned.values())), "ranks": len(learned)}
            _log.info("data-parallel groups of decode ranks", extra={"fields": fields})

    def _size_of(self, group: list[Target]) -> int | None:
        """Return how many ranks a group has; None if their numbers are not all of 0 to n-1."""
        numbers = set(chain.from_iterable(self._numbers[target] for target in group))
        return len(numbers) if numbers == set(map(str, range(len(numbers)))) else None


# Finds the instance at fault when KV caches cannot be pulled: the prefiller, or the rank.
#
# The rank reports it, whichever is at fault: with a 5xx, an error event, or silence. So failures
# are kept by both sides, until a pull of that side succeeds. A prefiller that fails with several
# ranks is itself at fault, and so is a rank that fails with several prefillers. Where the
# failures are all of one pair, the side that works with other instances is not at fault. And it takes
# several requests: one that no engine can answer says nothing of the engines.
#
# A prefiller at fault is quarantined, and comes back on trial: with one request at a time until
# one pull succeeds. What it fails then is mended outside of the retry budget, and it waits longer
# before the next trial.

# The prefillers and the ranks that pull from them at present.
Pairs = Iterable[tuple["Prefiller", "Rank"]]
# Failures kept of each side: more of one that cannot be judged add nothing.
_KEPT = 32


class KvTransfers:
    """Judges prefillers and ranks by the pulls between them.

    Args:
        enough: Requests that fail in a row before an instance is at fault.
        pulling: Returns which ranks pull from which prefillers at present.
        convict: Quarantines one that is at fault, and returns whether it did: its role may have
            no other instance. `again` says that it was on trial.
        is_on_trial: Returns whether an instance has just come back, and served nothing since.
        count: Called with the names of both sides and the reason of every failure.
        passed: Called when a prefiller's trial is over.
    """

    def __init__(
        self,
        enough: int,
        *,
        pulling: Callable[[], Pairs],
        convict: Callable[[Target, str, bool], bool],
        is_on_trial: Callable[[Target], bool],
        count: Callable[[str, str, str], None],
        passed: Callable[[], None],
    ) -> None:
        self._enough = enough
        self._pulling = pulling
        self._convict = convict
        self._is_on_trial = is_on_trial
        self._count = count
        self._passed = passed
        # By instance: the requests that failed since its last success, and with whom, in order.
        self._failures: dict[Target, dict[tuple[RequestId, Target], None]] = {}

    def succeeded(self, prefiller: Prefiller, rank: Rank) -> None:
        if self._failures:
            self._failures.pop(prefiller.target, None)
            self._failures.pop(rank.target, None)
        if prefiller.kv_trial:
            prefiller.kv_trial = False
            self._passed()

    def failed(
        self,
        request: RequestId,
        prefiller: Prefiller,
        rank: Rank,
        fault: Fault,
        reason: str,
    ) -> None:
        """Note that a rank failed to pull a KV cache, and quarantine the instance at fault, if known."""
        self._count(prefiller.name, rank.name, fault.value)
        self._note(prefiller.target, request, rank.target)
        self._note(rank.target, request, prefiller.target)
        if fault is Fault.SERVER_ERROR:  # vLLM answers "Internal server error", whatever it is.
            reason += "; the log of that rank says why"
        if prefiller.kv_trial or self._outweighs(prefiller.target, rank.target):
            again, prefiller.kv_trial = prefiller.kv_trial, True
            why = f"KV caches cannot be pulled: rank {rank.name}: {reason}"
            if not self._convict(prefiller.target, why, again):
                prefiller.kv_trial = again
            self._failures.pop(rank.target, None)
            return
        on_trial = self._is_on_trial(rank.target)
        if on_trial or self._outweighs(rank.target, prefiller.target):
            why = f"KV caches cannot be pulled from {prefiller.name}: {reason}"
            self._convict(rank.target, why, on_trial)
            self._failures.pop(prefiller.target, None)

    def _note(self, target: Target, request: RequestId, other: Target) -> None:
        failures = self._failures.setdefault(target, {})
        failures[request, other] = None
        if len(failures) > _KEPT:
            del failures[next(iter(failures))]

    def _outweighs(self, one: Target, other: Target) -> bool:
        """Return whether an instance is at fault rather than the other of its pair."""
        weight, other_weight = self._weight(one), self._weight(other)
        if weight[1] < self._enough:
            return False
        if weight == other_weight:
            return self._works_with(other, other_than=one)
        return weight > other_weight

    def _weight(self, target: Target) -> tuple[int, int]:
        """Return how many instances one failed with, and how many requests."""
        failures = self._failures[target]
        return len({other for _, other in failures}), len({request for request, _ in failures})

    def _works_with(self, target: Target, *, other_than: Target) -> bool:
        """Return whether pulls between an instance and other ones go on, though none has ended yet."""
        return any(
            target in (prefiller.target, rank.target)
            and other_than not in (prefiller.target, rank.target)
            for prefiller, rank in self._pulling()
        )
