"""One run with several groups of engines; see `trial`."""

import asyncio
import io
import json
import random
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.chaos.clients import Client, ClientEnding, Received, Visit
from tests.support.chaos.judge import Judge, Judging, Verdict, refusal_is_wrong
from tests.support.chaos.log_capture import LogCapture
from tests.support.chaos.plan import (
    MODEL,
    ChaosPlan,
    Weather,
    draw_group,
    draw_plan,
    with_orders,
)
from tests.support.chaos.requests import ClientRequest
from tests.support.chaos.trial import Trial, TrialReport, run_trial
from tests.support.chaos.world import (
    EPOCH_S,
    Part,
    SchedulerStep,
    SchedulerWatch,
    World,
    WorldSettings,
)
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.live.control.roster import Addition
from balanceroute.proxy.live.settings.aliases import CHOOSERS, FALL_BACKS
from balanceroute.proxy.live.settings.configure import make_config, make_group, read_credentials
from balanceroute.proxy.model_choice import QNetwork, inputs_of
from balanceroute.proxy.wire.messages import Response
from balanceroute.topologies.topology import read_topology

if TYPE_CHECKING:
    from balanceroute.proxy.live.deployment import Deployment


# A proxy before several groups of engines in one virtual-time loop.


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One group."""

    engines: EmulationSettings  # Its fleet.
    table: str = ""  # More lines of its `[[model]]` table, before its engines.
    proxy: str = ""  # Lines of its `[model.proxy]` table.


class GroupWorld(World):
    """One proxy before several fleets, made from a topology file.

    Attributes:
        fleets: By the group's name; `fleet` is the first.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSettings],
        loop: VirtualLoop,
        rng: random.Random,
        *,
        flags: Mapping[str, object],
        more: str = "",
        tenants: str = "",
        files: Mapping[str, bytes] = MappingProxyType({}),
        orders: OrderStore | None = None,
        watch: Callable[[SchedulerStep], None] = lambda _: None,
    ) -> None:
        """Take the groups by name.

        `more` are further tables of the file, `files` lie beside it; `orders` outlives the proxy.
        """
        first = next(iter(groups.values()))
        super().__init__(WorldSettings(first.engines, flags, tenants), loop, rng, watch=watch)
        self._groups = groups
        self._more = more
        self._files = files
        self._orders = orders
        self.fleets = {
            name: EmulatedFleet(
                one.engines, rng=random.Random(rng.getrandbits(64)), epoch_s=EPOCH_S
            )
            for name, one in groups.items()
        }
        self.fleet = next(iter(self.fleets.values()))
        self.deployments_made = len(groups)
        self._latest: dict[str, Deployment] = {}
        self._observers = {
            name: SchedulerWatch(partial(self._scheduler_of, name), watch, group=name)
            for name in groups
        }

    @property
    def parts(self) -> Sequence[Part]:
        return [
            Part(name, fleet, self._observers[name], lambda: self.plane.deployments)
            for name, fleet in self.fleets.items()
        ]

    def _scheduler_of(self, name: str) -> Scheduler:
        # While a group is removed or added it is not there, and its requests end.
        self._latest |= self.plane.deployments
        return self._latest[name].driver.scheduler

    async def start(self, front: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the engines, unless they run, and the proxy; see `World.start`."""
        self._front = front
        await self.start_engines()
        flags = {
            "host": "127.0.0.1",
            "port": 0,
            "admin": False,
            "log": "none",
            "tenants": self._write_tenants(self._settings.tenants),
            **self._settings.flags,
        }
        path = self._folder / "groups.toml"
        path.write_text(self.topology())
        for name, data in self._files.items():
            path.with_name(name).write_bytes(data)
        topology = read_topology(path)
        environment = self._make_environment(partial(read_credentials, topology, flags))
        make = partial(make_group, topology, flags)
        environment = replace(
            environment,
            make_group=make,
            orders=self._orders,
            group_observers=self._observers,
        )
        await self._begin(make_config(topology, flags), environment)
        self._latest |= self.plane.deployments

    def topology(self) -> str:
        lines = ['name = "groups"']
        for name, group in self._groups.items():
            fleet = self.fleets[name]
            lines += ["[[model]]", f'name = "{name}"', group.table]
            lines.append(f'connector = "{group.engines.connector}"')
            for place, url in enumerate(fleet.prefill_urls):
                lines += ["[[model.prefill]]", f'url = "{self.known(url)}"']
                if fleet.bootstrap_urls:
                    lines.append(f'bootstrap = "{fleet.bootstrap_urls[place]}"')
            for url in fleet.decode_urls:
                base, _, rank = url.partition("@")
                lines += ["[[model.decode]]", f'url = "{self.known(base)}"']
                if rank:
                    lines.append(f"rank_ids = [{rank}]")
            if group.proxy:
                lines += ["[model.proxy]", group.proxy]
        return "\n".join([*lines, self._more, ""])

    def engine_name(self, url: str) -> str:
        """Return what an engine is called: its group and its own name, as in `large:decode/0`."""
        return next(
            f"{name}:{engine.name}"
            for name, fleet in self.fleets.items()
            for engine in fleet.engines
            if engine.url == url
        )

    async def begin_group(self, name: str) -> Response:
        """Add a group that was removed, by an administrator's order; return the answer."""
        tables: list[dict[str, Any]] = tomllib.loads(self.topology())["model"]
        self._observers[name].forget()
        self.deployments_made += 1
        return await self._order("", next(one for one in tables if one["name"] == name))

    async def drain_group(self, name: str) -> Response:
        return await self._order("/drain", {"group": name})

    async def end_group(self, name: str, *, force: bool) -> Response:
        return await self._order("/remove", {"group": name, "force": force})

    async def _order(self, path: str, order: Mapping[str, object]) -> Response:
        return await self.ask("POST", f"/admin/groups{path}", order)


# What happens in a run with several groups of engines: aliases, fall-back chains, and orders
# about groups.

# Settings of the whole proxy; every group may have its own values of the remaining ones.
_OF_ALL = ("answer_limit_bytes", "drain_timeout_s", "write_timeout_s", "write_buffer_bytes")
_NAMES = ("small", "medium", "large")
_TASKS = ("chat", "code")
_SEEDS_APART = 1_000_003
_HIDDEN = 8


class GroupAct(Enum):
    """What an administrator does with a group, before it is as it was."""

    DRAIN = "is drained"
    REMOVE = "is removed with all that it does"
    REPLACE = "is drained, removed and added again"


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """One of them: from when to when."""

    group: str
    act: GroupAct
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DrawnAlias:
    """One alias; `members` are those of its table."""

    name: str
    groups: tuple[str, ...]
    members: Mapping[str, object]
    weights: bytes = b""  # The file of its weights; empty if it has none.

    def table(self) -> str:
        # Numbers, texts and lists of them are alike in JSON and TOML.
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.members.items()]
        scores = [round(1 / (len(self.groups) - place), 3) for place in range(len(self.groups))]
        tasks = ", ".join(f"{task} = {scores}" for task in _TASKS)
        lines += [f"tasks = {{ {tasks} }}", 'paths = { "/v1/completions" = "code" }']
        return "\n".join([f"[alias.{self.name}]", f"groups = {json.dumps(self.groups)}", *lines])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One run."""

    whole: ChaosPlan  # What is of all groups: the clients, the tenants, the weather, and when.
    groups: Mapping[str, ChaosPlan]  # What happens to the engines of each, by name.
    aliases: Sequence[DrawnAlias]
    orders: Sequence[GroupOrder]

    def may_answer(self, request: ClientRequest) -> Sequence[str]:
        """Return the groups that may answer a request; empty if it names none."""
        model = request.values.get("model")
        found = [one.groups for one in self.aliases if one.name == model]
        return found[0] if found else [name for name in self.groups if name == model]

    def is_of_alias(self, request: ClientRequest) -> bool:
        """Return whether a request leaves the choice to the proxy."""
        return any(one.name == request.values.get("model") for one in self.aliases)

    @property
    def leaving(self) -> set[str]:
        """The groups that are not there all the time."""
        return {one.group for one in self.orders if one.act is not GroupAct.DRAIN}

    @property
    def tables(self) -> str:
        return "\n".join(one.table() for one in self.aliases)

    @property
    def files(self) -> dict[str, bytes]:
        return {_file_of(one.name): one.weights for one in self.aliases if one.weights}

    @property
    def flags(self) -> dict[str, object]:
        flags = {name: self.whole.world.flags[name] for name in _OF_ALL}
        return {"admin": True, "admin_port": 0, **flags}

    def settings(self) -> dict[str, GroupSettings]:
        return {
            name: GroupSettings(plan.world.engines, proxy=_lines(plan.world.flags))
            for name, plan in self.groups.items()
        }


def draw_groups(seed: int, *, requests: int) -> GroupPlan:
    """Return the plan of a seed; see `draw_plan`."""
    whole = draw_plan(seed, requests=requests)
    ordered = with_orders(replace(whole, injections=(), orders=()), of_all=True)
    whole = replace(whole, orders=ordered.orders, calm_s=max(whole.calm_s, ordered.calm_s))
    rng = random.Random(f"groups {seed}")
    names = _NAMES[: rng.randint(2, len(_NAMES))]
    groups = {
        name: _without_events(draw_group(seed * _SEEDS_APART + place, whole, name))
        for place, name in enumerate(names)
    }
    aliases = [_alias(rng, name, names) for name in ("best", "cheap")[: rng.randint(1, 2)]]
    orders = [] if whole.weather in (Weather.CALM, Weather.SHUTDOWN) else _orders(rng, whole, names)
    whole = replace(
        whole,
        visits=tuple(_renamed(rng, one, aliases, names) for one in whole.visits),
        calm_s=max(
            [
                *(one.calm_s for one in (whole, *groups.values())),
                *(one.end_s + 0.1 for one in orders),
            ]
        ),
    )
    return GroupPlan(whole, groups, aliases, orders)


def named(request: ClientRequest, model: str) -> ClientRequest:
    """Return a request that names another model."""
    old, new = (json.dumps(one).encode() for one in (request.values["model"], model))
    # In any of the spellings; the name is said once.
    body = request.body.replace(old, new, 1)
    return replace(request, values=request.values | {"model": model}, body=body)


def _without_events(plan: ChaosPlan) -> ChaosPlan:
    """Return a plan whose prefillers send no KV events: the link for them has one fleet."""
    engines = replace(plan.world.engines, kv_events=False, kv_event_faults=0.0)
    flags = {name: value for name, value in plan.world.flags.items() if name != "kv_replay"}
    return replace(plan, world=replace(plan.world, engines=engines, flags=flags))


def _alias(rng: random.Random, name: str, names: Sequence[str]) -> DrawnAlias:
    groups = tuple(rng.sample(names, rng.randint(2, len(names))))
    chooser = rng.choice(list(CHOOSERS))
    members: dict[str, object] = {"chooser": chooser}
    weights = b""
    if chooser == "static":
        members["static"] = rng.choice(groups)
    if chooser != "static" or rng.random() < 0.5:
        members["tpot_ms"] = rng.choice([5.0, 20.0, 100.0])
        if rng.random() < 0.5:
            members["ttft_ms"] = rng.choice([20.0, 200.0])
    if chooser == "ddqn":
        members["weights"] = _file_of(name)
        weights = _weights(rng.getrandbits(32), len(groups))
    if rng.random() < 0.75:
        reasons = rng.sample(list(FALL_BACKS), rng.randint(1, len(FALL_BACKS)))
        members["fall_back"] = reasons
        if "timeout" in reasons and rng.random() < 0.7:
            members["fall_back_after_s"] = rng.choice([0.05, 0.3, 2.0])
    return DrawnAlias(name, groups, members, weights)


def _file_of(alias: str) -> str:
    return f"{alias}.npz"


def _weights(seed: int, groups: int) -> bytes:
    """Return the weights of a network that has learned nothing."""
    inputs = inputs_of(groups, len(_TASKS))
    network = QNetwork.drawn(inputs, _HIDDEN, groups, np.random.default_rng(seed))
    file = io.BytesIO()
    np.savez(file, **network.parameters)  # type: ignore[arg-type]
    return file.getvalue()


def _orders(rng: random.Random, whole: ChaosPlan, names: Sequence[str]) -> list[GroupOrder]:
    """Return orders about groups, one after the other for each; the first group always stays."""
    span_s = whole.visits[-1].start_s
    orders = []
    for name in names[1:]:
        begin_s = 0.0
        for _ in range(rng.choice([0, 1, 1, 2])):
            # Some groups are there only later.
            start_s = rng.choice([begin_s, rng.uniform(begin_s, max(begin_s, span_s))])
            begin_s = start_s + rng.choice([0.3, 1.0, 4.0]) * rng.uniform(0.5, 1.5)
            orders.append(GroupOrder(name, rng.choice(list(GroupAct)), start_s, begin_s))
            begin_s += 1.0
    return orders


def _renamed(
    rng: random.Random, visit: Visit, aliases: Sequence[DrawnAlias], names: Sequence[str]
) -> Visit:
    """Return a visit whose requests name groups and aliases, but for those that name none."""

    def rename(request: ClientRequest) -> ClientRequest:
        if request.values.get("model") != MODEL:
            return request
        of_alias = rng.random() < 0.5
        return named(request, rng.choice([one.name for one in aliases] if of_alias else names))

    return replace(visit, requests=tuple(map(rename, visit.requests)))


def _lines(flags: Mapping[str, object]) -> str:
    given = {name: value for name, value in flags.items() if value is not None}
    return "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in given.items() if name not in _OF_ALL
    )


# What became of one client's request where there are several groups, and whether that may be.


class GroupJudge:
    """Has each answer compared by the judge of the group that gave it; see `Judge`.

    Args:
        plan: What was to happen.
        judges: Those of the groups, by name.
    """

    def __init__(self, plan: GroupPlan, judges: Mapping[str, Judge]) -> None:
        self._plan = plan
        self._judges = judges
        self.tenants = plan.whole.tenants
        self.merges = any(one.merges for one in judges.values())

    def may_draw_seed(self, request: ClientRequest) -> bool:
        """Return whether the proxy may have drawn a seed for a request."""
        return any(one.may_draw_seed(request) for one in self._judges.values())

    async def judge(
        self,
        client: Client,
        request: ClientRequest,
        received: Received,
        *,
        reworded: bool,
        seed: int | None,
    ) -> Verdict:
        """Return what became of one request; see `Judge.judge`."""
        names = self._plan.may_answer(request)
        if not names and received.status:
            return self._judge_unknown(client, request, received)
        said = received.header(b"x-balanceroute-model").decode()
        if received.status == 200 and self._plan.is_of_alias(request):
            # Comments that come while another group may still answer begin a stream without a name.
            if said or not received.body.startswith(b":"):
                if said not in names:
                    return Verdict("wrong", [f"it was answered by {said!r}, which may not"])
                names = [said]
        elif said and not self._plan.is_of_alias(request):
            return Verdict("wrong", [f"it named its model, and {said!r} was chosen"])
        verdicts = [
            await self._judges[name].judge(
                client,
                named(request, name) if "model" in request.values else request,
                received,
                reworded=reworded,
                seed=seed,
            )
            for name in names or self._judges
        ]
        verdict = next((one for one in verdicts if not one.wrong), verdicts[0])
        # Until it is there again the proxy does not know its name.
        if received.status == 404 and not self._plan.leaving.isdisjoint(names):
            verdict.wrong = [] if client.left else refusal_is_wrong(request, received)
        return verdict

    def _judge_unknown(self, client: Client, request: ClientRequest, received: Received) -> Verdict:
        """Judge the answer to a request that names no group."""
        verdict = Verdict(f"status {received.status}", [])
        if received.status == 200:
            verdict.wrong.append("it was served, and names no group")
            return verdict
        if not client.left:
            cut = received.ending is not ClientEnding.COMPLETE and not client.visit.pauses
            verdict.wrong += ["its refusal is cut"] if cut else refusal_is_wrong(request, received)
        explained = None if self.tenants is None else self.tenants.wrongs(request, received)
        if explained is not None:
            verdict.wrong += explained
        elif received.status not in (400, 404):
            verdict.wrong.append(f"it got {received.status}, and names no group")
        return verdict


# What the removal of a group with requests is refused for.
_BUSY = b"in flight"


def run_seed_of_groups(seed: int, *, requests: int) -> TrialReport:
    plan = draw_groups(seed, requests=requests)
    return run_trial(plan.whole, lambda loop, report, log: GroupTrial(plan, loop, report, log))


class GroupTrial(Trial):
    """One run."""

    _world: GroupWorld

    def __init__(
        self, plan: GroupPlan, loop: VirtualLoop, report: TrialReport, log: LogCapture
    ) -> None:
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

    def _plan_of(self, part: Part) -> ChaosPlan:
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
                await roster.add(Addition(target.role, target.url))

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
            found = f"{answer.status}: {answer.body!r}"
            self._report.violations.append(f"order: {order.group} {order.act.value}: {found}")
