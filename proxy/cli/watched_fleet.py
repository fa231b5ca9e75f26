"""How a command looks at a running fleet for some time, with a line on the terminal meanwhile."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from balanceroute.proxy.core.setting import file, number
from balanceroute.proxy.lab.audit.observation import Look, Watcher

# How a command looks at a running fleet for some time, with a line on the terminal meanwhile.


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How long and how closely is looked."""

    minutes: float = number(5.0, "look at a running fleet for so long", 0.1, 1440.0, metavar="N")
    interval_s: float = number(1.0, "between two looks", 0.05, 60.0, metavar="S")
    timeout_s: float = number(5.0, "for one page", 0.1, 60.0, metavar="S")
    ca_file: Path | None = file(
        "verifies the certificates of https:// addresses (default: the system's authorities)"
    )


async def look_at(fleet: Watcher, watched: Watched) -> list[Look]:
    """Look at a fleet as asked for.

    Raises:
        ConfigError: The fleet cannot be read.
    """
    with Console(stderr=True).status("looking at the engines") as status:
        return await fleet.watch(
            seconds=60.0 * watched.minutes,
            interval_s=watched.interval_s,
            progress=lambda looks: status.update(f"{looks:,} looks at the engines"),
        )
