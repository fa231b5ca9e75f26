"""The pictures of the pages: the way of a request, and a reservation."""

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
from balanceroute.proxy.lab.sim.workload import split
from experiment import MOONCAKE, requests_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WIDTH, HEIGHT = 800, 416
STYLE = """
  .page { fill: #fcfcfb } .proxy { fill: #eef3fb; stroke: #4a74b8 } .box { fill: #ffffff; stroke: #8a93a3 }
  .bar { fill: #7fa3dc } .lost { fill: #f3c58b } .barrier { stroke: #b4561a } .name { fill: #16202e; font-weight: 600 }
  .text { fill: #3c4756 } .step { fill: #1d4f9c; font-weight: 600 } .way { stroke: #1d4f9c } .head { fill: #1d4f9c }
  .kv { stroke: #1d4f9c; stroke-dasharray: 5 4 } text { font: 13.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
  line, path, rect { stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181f } .proxy { fill: #1a2638; stroke: #6c96dc } .box { fill: #202733; stroke: #77818f }
    .bar { fill: #4f7cc4 } .lost { fill: #8a5a25 } .barrier { stroke: #f0a35e } .name { fill: #eef2f7 }
    .text { fill: #c3cbd6 } .step { fill: #9cc0ff } .way, .kv { stroke: #9cc0ff } .head { fill: #9cc0ff }
  }
"""
SAYS = (
    "A client sends a request to BalanceRoute. Its gateway checks the request, its queue holds it until a"
    " prefiller has room. The prefiller computes the prompt and keeps the KV cache, the pool holds the request"
    " until a decode rank has a slot on which it delays nobody. The rank pulls the KV cache from the prefiller, and the"
    " events of its answer go to the client."
)


@dataclass(frozen=True)
class Box:
    """A box with a name and lines of text."""

    place: tuple[int, int, int, int]  # Left, top, width and height, in px.
    name: str  # What it is.
    lines: tuple[str, ...] = ()  # What it does.
    look: str = "box"  # Its class in `STYLE`.


BOXES = (
    Box((16, 56, 96, 344), "Client", ("OpenAI's or", "Anthropic's", "API")),
    Box((196, 16, 288, 384), "BalanceRoute", look="proxy"),
    Box((210, 50, 260, 58), "Gateway", ("checks route, key, limits and body",)),
    Box((210, 130, 260, 58), "Queue", ("a request waits for a prefiller",)),
    Box(
        (210, 210, 260, 76),
        "Pool",
        ("a prefilled request waits for a rank", "on which it delays nobody"),
    ),
    Box((210, 326, 260, 58), "Relay", ("passes events on, byte for byte",)),
    Box(
        (604, 50, 180, 186),
        "Prefillers",
        ("compute the prompt,", "keep its KV cache", "under a lease"),
    ),
    Box((604, 280, 180, 120), "Decode ranks"),
)
LOADS = (0.72, 0.55, 1.0, 0.64, 0.8, 0.48, 0.69, 0.86)  # Of the fullest rank.
BARS = (616, 316, 156, 46)  # Left, top, width and height of the ranks' bars.


def picture() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" aria-labelledby="title says">',
        '<title id="title">The way of a request</title>',
        f'<desc id="says">{SAYS}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        *(line for box in BOXES for line in _box(box)),
        *_ranks(),
        _way("M112 79H210", "1 request", (117, 72)),
        _way("M470 159H604", "2 prefill", (494, 152)),
        _way("M604 222H470", "3 KV params", (494, 215)),
        _way("M470 264H544V304H604", "4 decode", (494, 257)),
        _way("M684 236V280", "5 KV cache", (692, 263), look="kv"),
        _way("M604 355H470", "6 events", (494, 348)),
        _way("M210 355H112", "7 events", (117, 348)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(box: Box) -> list[str]:
    left, top, width, height = box.place
    lines = [
        f'<rect class="{box.look}" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>',
        f'<text class="name" x="{left + 12}" y="{top + 23}">{box.name}</text>',
    ]
    for number, line in enumerate(box.lines):
        lines.append(
            f'<text class="text" x="{left + 12}" y="{top + 45 + 19 * number}">{line}</text>'
        )
    return lines


def _ranks() -> list[str]:
    """Draw the loads of the ranks, and the time that each loses until the fullest is done."""
    left, top, width, height = BARS
    step = width / len(LOADS)
    lines: list[str] = []
    for rank, load in enumerate(LOADS):
        lost = height * (1 - load)
        place = f'x="{left + rank * step:.1f}" width="{step - 4:.1f}"'
        lines.append(f'<rect class="lost" {place} y="{top}" height="{lost:.1f}"/>')
        lines.append(
            f'<rect class="bar" {place} y="{top + lost:.1f}" height="{height - lost:.1f}"/>'
        )
    lines.append(f'<path class="barrier" d="M{left - 6} {top}H{left + width + 2}"/>')
    lines.append(
        f'<text class="text" x="{left}" y="{top + height + 20}">the fullest sets the step</text>'
    )
    return lines


def _way(points: str, words: str, at: tuple[int, int], *, look: str = "way") -> str:
    arrow = f'<path class="{look}" d="{points}" fill="none" marker-end="url(#head)"/>'
    return f'{arrow}<text class="step" x="{at[0]}" y="{at[1]}">{words}</text>' if words else arrow


def request_path(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Draw the way of a request: docs/img/request_path.svg.

    The picture has its own background and follows the reader's colour scheme. Its text is at least 13 px high
    at the width of 800 px at which pages show it.
    """
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.parse_args(words).out.write_text(picture(), encoding="utf-8")


RANKS, BATCH, BACKLOG, SEGMENTS = 8, 16, 64, 6
MARGIN_STEPS = 40
_RESERVED, _OTHERS, _WAIT = "#0067a5", "#c3c8ce", "#f6cf9b"


@dataclass(slots=True)
class Recording:
    """What the picture needs of every step."""

    loads: list[list[int]] = field(default_factory=list)  # KV tokens by rank.
    # The request of each reserved rank.
    reserved: list[dict[int, RequestId]] = field(default_factory=list)
    # The step before which each request was admitted.
    admitted: dict[RequestId, int] = field(default_factory=dict)


def record() -> tuple[Recording, list[int]]:
    """Simulate; return the recording and the prompt tokens of every request."""
    requests = requests_of(MOONCAKE)
    workload = split(requests, segments=SEGMENTS, backlog=BACKLOG)[0]
    parts = PolicyInputs(RANKS, BATCH, PolicySettings(), random.Random(0), NoPrediction())
    policy = make_policy("br-0", parts)
    assert isinstance(policy, TwoStage)
    recording = Recording()

    def observe(event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, StepCompleted):
            recording.loads.append(simulation.scheduler.ledger.loads.tolist())
            recording.reserved.append(dict(policy.reserved))
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


def reservation(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Draw what a reservation does, from a simulation: docs/img/reservation.png.

    A segment of the Mooncake conversation trace, saturated, under BR-0. Of all reservations the picture
    shows the one that makes most room: the loads of the ranks from a little before it begins until a little
    after its request was admitted.
    """
    parser.add_argument("out", type=Path, metavar="OUT.png")
    out: Path = parser.parse_args(words).out
    recording, prompts = record()
    write_pictures({out.stem: lambda: draw(recording, prompts)}, out.parent)
