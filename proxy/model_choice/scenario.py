"""The groups of an alias, as training and judgement model them, and what answers are worth."""

from dataclasses import dataclass

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice.base import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupModel:
    """A deployment of one model: data-parallel decode ranks behind a barrier, evenly loaded.

    Attributes:
        name: The model's.
        ranks: Its decode ranks.
        slots: Requests that a rank decodes at once.
        step_base_ms: What a decode step takes without load.
        step_us_per_token: What each KV token of a rank adds to it.
        prefill_servers: Its prefillers; 0 if a prefill takes no time.
        prefill_base_ms: What a prefill takes beside its tokens.
        prefill_us_per_token: What each prompt token adds to it.
    """

    name: str
    ranks: int
    slots: int
    step_base_ms: float
    step_us_per_token: float
    prefill_servers: int = 0
    prefill_base_ms: float = 0.0
    prefill_us_per_token: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An alias: its groups, and the worth of their answers.

    Attributes:
        groups: From the smallest model to the largest.
        tasks: What requests ask for.
        scores: The worth of an answer in time, by task and by group: of shape (tasks, groups).
        targets: What "in time" means.

    Raises:
        ConfigError: The scores have another shape, or are no shares.
    """

    groups: tuple[GroupModel, ...]
    tasks: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    targets: Targets

    def __post_init__(self) -> None:
        if not self.groups or not self.tasks:
            raise ConfigError("an alias needs a group and a task")
        shape = [len(row) for row in self.scores]
        if shape != [len(self.groups)] * len(self.tasks):
            raise ConfigError(
                f"the scores must be {len(self.tasks)} rows (tasks) of {len(self.groups)} (groups)"
            )
        if not all(0 <= score <= 1 for row in self.scores for score in row):
            raise ConfigError("a score must be from 0 to 1")


def paper_scenario() -> Scenario:
    """Return three models of different size with the worth of answers of the paper's table 1.

    The step times are this project's: at the lengths of the Azure conversation trace the large
    model keeps 40 ms a token up to some 11 requests/s, the middle one up to some 38, the small one
    beyond 48, as in the paper's figure 4.
    """
    return Scenario(
        groups=(
            GroupModel(name="small", ranks=4, slots=512, step_base_ms=8, step_us_per_token=0.05),
            GroupModel(name="medium", ranks=4, slots=512, step_base_ms=20, step_us_per_token=0.2),
            GroupModel(name="large", ranks=4, slots=512, step_base_ms=34, step_us_per_token=0.2),
        ),
        tasks=("HellaSwag", "COPA", "PIQA", "OpenBookQA"),
        scores=((0.45, 0.78, 1.0), (0.80, 0.95, 1.0), (0.82, 0.96, 1.0), (0.70, 0.94, 1.0)),
        targets=Targets(tpot_ms=40),
    )
