"""One run with several groups of engines; see `trial`."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.testing.chaos.group_judge import GroupJudge
from balanceroute.proxy.testing.chaos.group_plan import GroupAct, GroupOrder, GroupPlan, draw_groups
from balanceroute.proxy.testing.chaos.group_world import GroupWorld
from balanceroute.proxy.testing.chaos.judge import Judge, Judging
from balanceroute.proxy.testing.chaos.log_keeper import LogKeeper
from balanceroute.proxy.testing.chaos.plan import Plan
from balanceroute.proxy.testing.chaos.trial import Report, Trial, run_trial
from balanceroute.proxy.testing.chaos.world import Part, World
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.wire.messages import Response

# What the removal of a group with requests is refused for.
_BUSY = b"in flight"


def run_seed_of_groups(seed: int, *, requests: int) -> Report:
    """Carry a seed's plan with several groups out and return what came of it."""
    plan = draw_groups(seed, requests=requests)
    return run_trial(plan.whole, lambda loop, report, log: GroupTrial(plan, loop, report, log))


class GroupTrial(Trial):
    """One run."""

    _world: GroupWorld

    def __init__(self, plan: GroupPlan, loop: VirtualLoop, report: Report, log: LogKeeper) -> None:
        self._group_plan = plan
        self._ordered: list[asyncio.Task[None]] = []
        self._one = asyncio.Lock()
        super().__init__(plan.whole, loop, report, log)

    def _make_world(self) -> World:
        plan = self._group_plan
        return GroupWorld(
            plan.settings(),
            self._loop,
            self._rng,
            flags=plan.flags,
            more=plan.tables,
            tenants=self._plan.world.tenants,
            files=plan.files,
            watch=self._saw,
        )

    def _plan_of(self, part: Part) -> Plan:
        return self._group_plan.groups[part.name]

    def _make_judge(self, judges: Sequence[Judge]) -> Judging:
        names = [part.name for part in self._world.parts]
        return GroupJudge(self._group_plan, dict(zip(names, judges, strict=True)))

    # Orders about groups.

    def _begin_more(self) -> None:
        self._ordered = [
            self._loop.create_task(self._carry_out_all(name)) for name in self._group_plan.groups
        ]

    async def _end_more(self) -> None:
        await asyncio.gather(*self._ordered)

    async def _carry_out_all(self, group: str) -> None:
        """Carry out the orders about a group, one after the other even if the proxy stands still."""
        for order in self._group_plan.orders:
            if order.group == group:
                await self._carry_out(order)

    async def _carry_out(self, order: GroupOrder) -> None:
        world, group = self._world, order.group
        await self._until(order.start_s)
        self._report.faults[f"group: {order.act.value}"] += 1
        world.journal.write("order", order.act.value, group)
        match order.act:
            case GroupAct.DRAIN:
                await self._say(order, world.drain_group(group))
                await self._until(order.end_s)
                await self._take_back(group)
            case GroupAct.REMOVE:
                await self._say(order, world.end_group(group, force=True))
                await self._until(order.end_s)
                await self._say(order, world.begin_group(group))
            case GroupAct.REPLACE:
                await self._say(order, world.drain_group(group))
                await self._until(order.end_s)
                # Without force it is refused as long as a request is there.
                answer = await self._give(world.end_group(group, force=self._is_busy(group)))
                if answer.status == 409 and _BUSY in answer.body:
                    # One has come since: the proxy may have stood still, or be slow to be asked.
                    answer = await self._give(world.end_group(group, force=True))
                self._look_at(order, answer)
                await self._say(order, world.begin_group(group))
        world.journal.write("order over", order.act.value, group)

    async def _take_back(self, group: str) -> None:
        roster = self._world.plane.deployments[group].roster
        for target in list(roster.targets()):
            # Unless a fault of an engine has done so already.
            with suppress(ConflictError):
                await roster.add(target.role, target.url, ranks=None, bootstrap=None)

    def _is_busy(self, group: str) -> bool:
        deployment = self._world.plane.deployments[group]
        return bool(deployment.driver.sessions) or bool(deployment.pass_through.in_flight)

    async def _say(self, order: GroupOrder, saying: Awaitable[Response]) -> None:
        """Have an order carried out, which may not be refused."""
        self._look_at(order, await self._give(saying))

    async def _give(self, saying: Awaitable[Response]) -> Response:
        """Have an order carried out; there is one at a time."""
        async with self._one:
            return await saying

    def _look_at(self, order: GroupOrder, answer: Response) -> None:
        if answer.status != 200:
            told = f"{answer.status}: {answer.body!r}"
            self._report.violations.append(f"order: {order.group} {order.act.value}: {told}")
