"""What happens in a run with several groups of engines: aliases, fall-back chains, and orders about groups."""

import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from balanceroute.proxy.live.settings.aliases import CHOOSERS, FALL_BACKS
from balanceroute.proxy.model_choice import QNetwork, inputs_of
from balanceroute.proxy.testing.chaos.clients import Visit
from balanceroute.proxy.testing.chaos.group_world import GroupSettings
from balanceroute.proxy.testing.chaos.plan import (
    MODEL,
    Plan,
    Weather,
    draw_group,
    draw_plan,
    with_orders,
)
from balanceroute.proxy.testing.chaos.requests import ClientRequest

# Settings of the whole proxy; every group may have its own of the others.
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
    """One alias; `members` are those of its table.

    Attributes:
        weights: The file of its weights; empty if it has none.
    """

    name: str
    groups: tuple[str, ...]
    members: Mapping[str, object]
    weights: bytes = b""

    def table(self) -> str:
        """Return it as a file has it."""
        # Numbers, texts and lists of them are alike in JSON and TOML.
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.members.items()]
        scores = [round(1 / (len(self.groups) - place), 3) for place in range(len(self.groups))]
        tasks = ", ".join(f"{task} = {scores}" for task in _TASKS)
        lines += [f"tasks = {{ {tasks} }}", 'paths = { "/v1/completions" = "code" }']
        return "\n".join([f"[alias.{self.name}]", f"groups = {json.dumps(self.groups)}", *lines])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One run.

    Attributes:
        whole: What is of all groups: the clients, the tenants, the weather, and when.
        groups: What happens to the engines of each, by name.
    """

    whole: Plan
    groups: Mapping[str, Plan]
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
        """The aliases as a file has them."""
        return "\n".join(one.table() for one in self.aliases)

    @property
    def files(self) -> dict[str, bytes]:
        """The files that the aliases name."""
        return {_file_of(one.name): one.weights for one in self.aliases if one.weights}

    @property
    def flags(self) -> dict[str, object]:
        """The settings of the whole proxy."""
        flags = {name: self.whole.world.flags[name] for name in _OF_ALL}
        return {"admin": True, "admin_port": 0, **flags}

    def settings(self) -> dict[str, GroupSettings]:
        """Return the groups as a world takes them."""
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


def _without_events(plan: Plan) -> Plan:
    """Return a plan whose prefillers tell no KV events: the link for them has one fleet."""
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


def _orders(rng: random.Random, whole: Plan, names: Sequence[str]) -> list[GroupOrder]:
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
