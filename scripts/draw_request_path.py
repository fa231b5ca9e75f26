"""Draw the way of a request: docs/img/request_path.svg.

    python scripts/draw_request_path.py OUT.svg

The picture has its own background and follows the reader's colour scheme. Its text is at least 13 px high
at the width of 800 px at which pages show it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """A box with a name and lines of text.

    Attributes:
        place: Left, top, width and height, in px.
        name: What it is.
        lines: What it does.
        look: Its class in `STYLE`.
    """

    place: tuple[int, int, int, int]
    name: str
    lines: tuple[str, ...] = ()
    look: str = "box"


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


def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.parse_args(argv).out.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
