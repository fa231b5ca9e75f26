"""The common parts of all pictures: their look, an empty figure, and the writing of PNG files.

matplotlib is an extra, so it is imported only when a picture is drawn. Figures are drawn on canvases
of their own, with matplotlib's defaults instead of the user's settings: the same input gives the same
bytes.
"""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 180
INK = "#1d2126"
SOFT = "#5b626b"
_STYLE = {
    "axes.edgecolor": "#b4b9c0",
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # A file, a policy or a rank may have a $ in its name.
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


def require_matplotlib() -> None:
    """Find out whether pictures can be drawn, before hours of work on their data.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.style  # noqa: F401, PLC0415  # An extra.
    except ModuleNotFoundError as error:
        raise ConfigError("--plots needs the extra plots: pip install '.[plots]'") from error


def write_pictures(
    draws: "Mapping[str, Callable[[], Figure]]",
    directory: Path,
    style: Mapping[str, float] | None = None,
) -> list[Path]:
    """Draw figures, by name, and write each as a PNG file into a directory; return the files.

    `style` are matplotlib settings beside those of every picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    from matplotlib import style as styles  # noqa: PLC0415  # An extra.

    paths: list[Path] = []
    with styles.context(["default", {**_STYLE, **(style or {})}]):
        for name, draw in draws.items():
            paths.append(directory / f"{name}.png")
            # No metadata: it would name the version of matplotlib.
            draw().savefig(paths[-1], dpi=DPI, metadata={"Software": None})
    return paths


def wrapped(title: str, columns: int) -> list[str]:
    """Return a title of any length in at most three lines."""
    return textwrap.wrap(title, columns, max_lines=3, placeholder=" …")


def empty_figure(
    width_inches: float,
    height_inches: float,
    headline: str,
    lines: list[str],
    *,
    headline_points: float = 13.0,
    indent: float = 0.012,
    side_inches: float = 0.07,
) -> "Figure":
    """Return an empty figure under a bold headline and some lines.

    The height is without these. `indent` is a share of the width, `side_inches` the free space left and right
    of the charts.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # An extra.
    from matplotlib.figure import Figure  # noqa: PLC0415  # An extra.
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415  # An extra.

    header = 0.52 + 0.19 * len(lines)
    height = height_inches + header
    below = (0.008, 0.1 / height, 0.984, 1 - (header + 0.1) / height)
    layout = ConstrainedLayoutEngine(rect=below, w_pad=side_inches)
    figure = Figure(figsize=(width_inches, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    top, size = 1 - 0.14 / height, headline_points
    figure.text(indent, top, headline, va="top", fontsize=size, fontweight="bold")
    figure.text(indent, 1 - 0.42 / height, "\n".join(lines), va="top", color=SOFT)
    return figure
