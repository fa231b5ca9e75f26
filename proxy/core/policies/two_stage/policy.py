"""One call per round: the stages in their order, and the discount that follows the turnover."""

from collections.abc import Callable
from dataclasses import replace

from balanceroute.proxy.core.fscore import discounts, lasting_discount
from balanceroute.proxy.core.policies.base import Assignment, Fleet
from balanceroute.proxy.core.policies.two_stage.hold import Occupancy
from balanceroute.proxy.core.policies.two_stage.only_rank import fill_only_rank
from balanceroute.proxy.core.policies.two_stage.paper import fill_longest_queues
from balanceroute.proxy.core.policies.two_stage.reservation import Reservations
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.policies.two_stage.settings import TwoStageSettings
from balanceroute.proxy.core.policies.two_stage.stage_1 import place_all, place_overdue
from balanceroute.proxy.core.policies.two_stage.stage_2 import choose_subsets
from balanceroute.proxy.core.pool import Pool
from balanceroute.proxy.core.projection import Projection


def ignore_stage(stage: str) -> None:
    """Do nothing: the stages are not timed."""
    del stage


class TwoStage:
    """BR-0 without a projection, BR-H with one.

    Args:
        settings: The parameters; `settings.weights.steps` has one weight per projected step.
        projection: The projected loads; None for the present step only.
        on_stage: Called with the name of each stage as it ends, so that a driver can time them.

    Attributes:
        reservations: The reserved ranks.
    """

    slots_beyond_batch = 0

    def __init__(
        self,
        settings: TwoStageSettings,
        projection: Projection | None,
        on_stage: Callable[[str], None] = ignore_stage,
    ) -> None:
        self.projection = projection
        self.next_decision_ns: int | None = None
        self._settings = settings
        self._gamma = settings.gamma  # As lowered last, at this turnover.
        self._per_step = -1.0
        self.reservations = Reservations()
        self._on_stage = on_stage
        self._occupancy = Occupancy()

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Admit what fits. Paper: Algorithms 2 and 3."""
        self.next_decision_ns = None
        may_hold = self._settings.hold_ns > 0 and self._occupancy.is_high(fleet)
        # The usual case in saturation; it costs no projection.
        if not len(fleet.free_slots.nonzero()[0]):  # A third of what `count_nonzero` takes.
            return []
        if not (self._settings.paper or may_hold):
            forced = fill_only_rank(fleet, pool, now_ns)
            if forced is not None:
                self._on_stage("stage_1")
                return forced
        self._discount(fleet)
        work = Round(self._settings, self.projection, fleet, pool)
        self._on_stage("projection")
        if self._settings.paper:
            fill_longest_queues(work)
        else:
            # Overdue entries first, while every rank still has its slots.
            place_overdue(work, now_ns)
            self.next_decision_ns = place_all(work, now_ns, may_hold=may_hold)
            self.reservations.prune(work)
        self._on_stage("stage_1")
        # The free slots would go to the entries that are held.
        if self.next_decision_ns is None:
            choose_subsets(work, self.reservations)
        self._on_stage("stage_2")
        return work.assignments

    def _discount(self, fleet: Fleet) -> None:
        """Make the weights follow the turnover."""
        base = self._settings.gamma
        if base is None:
            return
        assert self.projection is not None
        per_step = fleet.turnover.per_step
        if per_step == self._per_step:
            return
        self._per_step = per_step
        # Rounded to hundredths, so most rounds change nothing.
        gamma = lasting_discount(base, per_step / len(fleet.loads))
        if gamma != self._gamma:
            self._gamma = gamma
            steps = discounts(self.projection.horizon_steps, gamma)
            weights = replace(self._settings.weights, steps=steps)
            self._settings = replace(self._settings, weights=weights)
