"""Draw what a reservation does, from a simulation: docs/img/reservation.png.

    python scripts/draw_reservation.py OUT.png

A segment of the Mooncake conversation trace, saturated, under BR-0. Of all reservations the picture
shows the one that makes most room: the loads of the ranks from a little before it begins until a little
after its request was admitted.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import Action, Admit, Event, RequestId, StepCompleted
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.lab.pictures import INK, empty_figure, write_pictures
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.workload import playable, split
from balanceroute.traces import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACE = Path(__file__).parents[1] / "traces" / "public" / "mooncake_conversation.jsonl.gz"
RANKS, BATCH, BACKLOG, SEGMENTS = 8, 16, 64, 6
MARGIN_STEPS = 40
_RESERVED, _OTHERS, _WAIT = "#0067a5", "#c3c8ce", "#f6cf9b"


@dataclass(slots=True)
class Recording:
    """What the picture needs of every step.

    Attributes:
        loads: KV tokens by rank.
        reserved: The request of each reserved rank.
        admitted: The step before which each request was admitted.
    """

    loads: list[list[int]] = field(default_factory=list)
    reserved: list[dict[int, RequestId]] = field(default_factory=list)
    admitted: dict[RequestId, int] = field(default_factory=dict)


def record() -> tuple[Recording, list[int]]:
    """Simulate; return the recording and the prompt tokens of every request."""
    requests = playable(read_trace(TRACE))
    workload = split(requests, segments=SEGMENTS, backlog=BACKLOG)[0]
    parts = PolicyInputs(RANKS, BATCH, PolicySettings(), random.Random(0), NoPrediction())
    policy = make_policy("br-0", parts)
    assert isinstance(policy, TwoStage)
    recording = Recording()

    def observe(event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, StepCompleted):
            recording.loads.append(simulation.scheduler.ledger.loads.tolist())
            recording.reserved.append(dict(policy.reservations.of_rank))
        for action in actions:
            if isinstance(action, Admit):
                recording.admitted[action.request] = len(recording.loads)

    simulation = Simulation(
        SimulatedDeployment(RANKS, BATCH), workload, policy, NoPrediction(), observer=observe
    )
    simulation.run()
    return recording, [request.prompt_tokens for request in workload.requests]


def most_room(recording: Recording) -> tuple[int, int, int, RequestId]:
    """Return the first and the last step of the reservation that made most room; rank and request."""
    began: dict[tuple[int, RequestId], int] = {}
    for step, reserved in enumerate(recording.reserved):
        for pair in reserved.items():
            began.setdefault(pair, step)

    found = [
        (first, recording.admitted[request] - 1, rank, request)
        for (rank, request), first in began.items()
        if recording.admitted[request] > first + MARGIN_STEPS
    ]
    return max(
        found, key=lambda one: recording.loads[one[0]][one[2]] - recording.loads[one[1]][one[2]]
    )


def draw(recording: Recording, prompts: list[int]) -> "Figure":
    """Return the figure."""
    first, last, rank, request = most_room(recording)
    begin, end = max(0, first - MARGIN_STEPS), last + 2 * MARGIN_STEPS
    loads = np.array(recording.loads[begin:end]) / 1e3
    steps = np.arange(begin, begin + len(loads)) - first
    envelope = loads.max(axis=1)
    title = "A reservation: one rank makes room, instead of all waiting"
    about = [
        f"Mooncake conversation, {RANKS} ranks x {BATCH}, saturated, BR-0: the one that makes most room"
    ]
    figure = empty_figure(8.0, 4.2, title, about)
    panel = figure.add_subplot()
    for other in range(RANKS):
        if other != rank:
            panel.plot(steps, loads[:, other], color=_OTHERS, lw=0.9)
    inside = (steps >= 0) & (steps <= last - first + 1)
    panel.fill_between(
        steps, loads[:, rank], envelope, where=inside, color=_WAIT, lw=0, label="room being made"
    )
    panel.plot(steps, envelope, color=INK, lw=1.1, label="envelope: the heaviest rank")
    panel.plot(steps, loads[:, rank], color=_RESERVED, lw=1.8, label=f"rank {rank}, reserved")
    panel.plot([], [], color=_OTHERS, lw=0.9, label="the other ranks")
    for step, text in (
        (0, "reserved:\nonly the smallest\nentries from here"),
        (last - first + 1, f"admitted:\n{prompts[request]:,} tokens"),
    ):
        panel.axvline(step, color=INK, lw=0.8, ls=(0, (2, 2)))
        panel.annotate(
            text,
            (step, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            fontsize="small",
            textcoords="offset points",
        )
    panel.set(xlabel="decode steps since the reservation", ylabel="KV tokens (thousands)")
    panel.set(xlim=(steps[0], steps[-1]), ylim=(0, 1.05 * envelope.max()))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def main() -> None:
    """Simulate and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.png")
    out: Path = parser.parse_args().out
    recording, prompts = record()
    write_pictures({out.stem: lambda: draw(recording, prompts)}, out.parent)


if __name__ == "__main__":
    main()
