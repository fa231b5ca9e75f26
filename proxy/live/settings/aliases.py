"""The aliases of a topology file: `[alias.NAME]` tables, each a choice among groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.setting import choice, file, number, table, text, texts, words
from balanceroute.proxy.live.settings.checks import model_name
from balanceroute.proxy.live.telemetry.request_metrics import AliasWorth
from balanceroute.proxy.model_choice import DoubleDqn, Greedy, ModelChoice, Static, Targets
from balanceroute.proxy.settings import Given
from balanceroute.topologies import did_you_mean

if TYPE_CHECKING:
    from balanceroute.topologies.topology import Topology

CHOOSERS = ("static", "greedy", "ddqn")
FALL_BACKS = ("429", "503", "timeout")
ANY_TASK = "any"
_MOST_TASKS = 64


def _scores(task: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(_is_score(one) for one in value):
        raise ConfigError(f"has {shown(value)} for {task!r}, must be numbers from 0 to 1")
    return tuple(float(one) for one in value)


def _is_score(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and 0 <= value <= 1  # type: ignore[operator, arg-type]


def _reason(word: str) -> str:
    if word not in FALL_BACKS:
        raise ConfigError(f"has {shown(word)}, must be of {', '.join(FALL_BACKS)}")
    return word


def _task(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"has {shown(value)} for {path!r}, must be the name of a task")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasTable:
    """The members of an `[alias.NAME]` table."""

    groups: tuple[str, ...] = texts(
        "the groups that may answer, from the smallest model to the largest",
        model_name,
        metavar="NAME",
        at_top=False,
    )
    chooser: str = choice("greedy", "how one of them is chosen", words(CHOOSERS))
    static: str = text(
        "", "with static, the group that answers (default: the largest)", metavar="NAME"
    )
    weights: Path | None = file("with ddqn, what `balanceroute model-router train` wrote")
    tpot_ms: float | None = number(
        None, "target of the time per output token", 0.001, 1e6, word="none"
    )
    ttft_ms: float | None = number(
        None, "target of the time to the first token", 0.001, 1e9, word="none"
    )
    tasks: tuple[tuple[str, tuple[float, ...]], ...] = table(
        "of each task the worth of an answer of each group, 0 to 1", _scores
    )
    default_task: str = text(
        "", "the task of requests that say none (default: the first)", metavar="TASK"
    )
    paths: tuple[tuple[str, str], ...] = table(
        'the task of requests to a path that say none, as in "/v1/completions" = "code"', _task
    )
    fall_back: tuple[str, ...] = texts(
        "what sends a request on to the next group while nothing of an answer has been sent: "
        f"{', '.join(FALL_BACKS)}",
        _reason,
        metavar="REASON",
        shown_default="nothing",
        at_top=False,
    )
    fall_back_after_s: float | None = number(
        None,
        "with timeout, for a stream's first byte (default: the groups' own time limits)",
        0.001,
        1e6,
        word="none",
    )


@dataclass(frozen=True, slots=True)
class AliasConfig:
    """One alias."""

    name: str
    groups: tuple[str, ...]  # The names of its groups, from the smallest model to the largest.
    chooser: str  # One of `CHOOSERS`.
    static: int  # With `static`, the place of the group that answers.
    weights: Path | None  # With `ddqn`, the trained weights.
    targets: Targets | None  # What latency an answer must keep; None for any.
    tasks: tuple[str, ...]  # What requests may ask for.
    # The worth of an answer by task and group; empty if it is not set.
    scores: tuple[tuple[float, ...], ...]
    default_task: str  # The task of requests that say none.
    paths: tuple[tuple[str, str], ...]  # The task of requests to a path that say none.
    fall_back: tuple[str, ...] = ()  # What sends a request on to the next group; empty for nothing.
    # How long a stream may wait for its first byte before it goes on; None for as long as its group
    # lets it.
    fall_back_after_s: float | None = None

    @property
    def worth(self) -> AliasWorth:
        by_task = zip(self.tasks, self.scores, strict=bool(self.scores))
        scores = {
            (task, group): score
            for task, row in by_task
            for group, score in zip(self.groups, row, strict=True)
        }
        targets = self.targets
        if targets is None:
            return AliasWorth(None, None, scores)
        return AliasWorth(targets.tpot_ms, targets.ttft_ms, scores)

    def make_choice(self) -> "ModelChoice":
        """Return what chooses. Raises ConfigError: the weights cannot be read."""
        if self.chooser == "static":
            return Static(self.static)
        if self.weights is None:
            return Greedy()
        return DoubleDqn.read(self.weights, groups=len(self.groups), tasks=len(self.tasks))


def read_aliases(topology: "Topology") -> tuple[AliasConfig, ...]:
    """Return the aliases of a file. Raises ConfigError: one of them cannot be used."""
    names = {one.name for one in topology.groups}
    taken = names.union(*(one.models for one in topology.groups))
    aliases = []
    for name, content in topology.aliases.items():
        where = f"alias.{name}"
        if name in taken:
            raise ConfigError(f"{topology.path}: [{where}]: a model has this name")
        try:
            model_name(name)
        except ConfigError as error:
            raise ConfigError(f"{topology.path}: [{where}] {error}") from None
        given = Given((AliasTable,), flags={}, table=content, table_name=where, file=topology.path)
        place = f"{topology.path}: [{where}]"
        aliases.append(_read(name, given, names, partial(_key_of, place)))
    return tuple(aliases)


def _read(name: str, given: Given, names: set[str], where: "_Where") -> AliasConfig:
    read = given.read(AliasTable)
    if not read.groups:
        raise ConfigError(f"{where('groups')}: names no group")
    for group in read.groups:
        if group not in names:
            hint = did_you_mean(group, sorted(names))
            raise ConfigError(f"{where('groups')}: there is no group {group!r}{hint}")
        if read.groups.count(group) > 1:
            raise ConfigError(f"{where('groups')} names {group!r} twice")
    targets = _targets(read, where)
    tasks, scores = _tasks(read, where)
    alias = AliasConfig(
        name,
        read.groups,
        read.chooser,
        _static(read, where),
        read.weights,
        targets,
        tasks,
        scores,
        _one_of(tasks, read.default_task, "default_task", where) or tasks[0],
        read.paths,
        read.fall_back,
        read.fall_back_after_s,
    )
    if read.fall_back_after_s is not None and "timeout" not in read.fall_back:
        raise ConfigError(f"{where('fall_back_after_s')}: needs timeout in fall_back")
    for path, task in read.paths:
        _one_of(tasks, task, "paths", where)
        if not path.startswith("/"):
            raise ConfigError(f"{where('paths')} has {path!r}, which is no path")
    with given.blamed("weights"):
        alias.make_choice()
    return alias


_Where = Callable[[str], str]


def _key_of(place: str, key: str) -> str:
    return f"{place}.{key}"


def _targets(read: AliasTable, where: _Where) -> Targets | None:
    if (read.chooser == "ddqn") is (read.weights is None):
        word = "is missing: ddqn needs it" if read.weights is None else "goes with ddqn alone"
        raise ConfigError(f"{where('weights')} {word}")
    if read.tpot_ms is not None or read.ttft_ms is not None:
        return Targets(read.tpot_ms, read.ttft_ms)
    if read.chooser == "static":
        return None
    raise ConfigError(f"{where('chooser')} is {read.chooser}, which needs tpot_ms or ttft_ms")


def _tasks(
    read: AliasTable, where: _Where
) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]:
    if not read.tasks:
        return (ANY_TASK,), ()
    if len(read.tasks) > _MOST_TASKS:
        raise ConfigError(f"{where('tasks')} has {len(read.tasks)}, may have {_MOST_TASKS}")
    for task, scores in read.tasks:
        if len(scores) != len(read.groups):
            wanted = f"must be {len(read.groups)}, one for each group"
            raise ConfigError(f"{where('tasks')} has {len(scores)} scores for {task!r}, {wanted}")
    return tuple(task for task, _ in read.tasks), tuple(scores for _, scores in read.tasks)


def _static(read: AliasTable, where: _Where) -> int:
    if read.static and read.chooser != "static":
        raise ConfigError(f"{where('static')} goes with the chooser static alone")
    if not read.static:
        return len(read.groups) - 1
    _one_of(read.groups, read.static, "static", where)
    return read.groups.index(read.static)


def _one_of(known: Sequence[str], word: str, name: str, where: _Where) -> str:
    if word and word not in known:
        raise ConfigError(f"{where(name)}: there is no {word!r}{did_you_mean(word, known)}")
    return word
