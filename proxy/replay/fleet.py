"""An emulated fleet's own figures, which only the ranks know, such as idle time at the barrier."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite

from balanceroute.proxy.replay.target import TargetError, call_json, parse_target

# Per call: half a megabyte.
LENGTHS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The figures of the decode ranks over a stretch of time.

    Attributes:
        mean_imbalance_tokens: max − min of the ranks' loads, mean over steps.
        idle_fraction: The share of rank time spent waiting at the barrier.
        tokens_per_s: Output tokens over the emulated time of the steps. A machine that cannot keep
            up makes the client's rate smaller, but not this one.
        steps: Decode steps.
        mean_late_s: How much later than due a step ended, mean over steps, in real seconds.
        late_s: The maximum of that.
    """

    mean_imbalance_tokens: float
    idle_fraction: float
    tokens_per_s: float
    steps: float
    mean_late_s: float
    late_s: float


class FleetClient:
    """Resets and reads the figures of an emulated fleet, and sends it the lengths of answers.

    Args:
        url: The URL of any server of the fleet.

    Raises:
        ConfigError: The URL is malformed.
    """

    def __init__(self, url: str) -> None:
        self._target = parse_target("--emulation", url)
        self._endpoint = self._target.connect()

    async def reset(self) -> None:
        """Start a new time span.

        Raises:
            TargetError: The server has no such figures.
            WireError: There is no answer.
        """
        await call_json(self._endpoint, self._target, "POST", "/emulation/stats/reset", [])

    async def send_lengths(self, lengths: Mapping[str, int]) -> None:
        """Send how many tokens the answers have, by the requests' ids.

        Raises:
            TargetError: The server is not of an emulated fleet that takes lengths.
            WireError: There is no answer.
        """
        names = list(lengths)
        for start in range(0, len(names), LENGTHS_AT_ONCE):
            some = {name: lengths[name] for name in names[start : start + LENGTHS_AT_ONCE]}
            body = json.dumps(some).encode()
            await call_json(
                self._endpoint, self._target, "POST", "/emulation/lengths", [], body=body
            )

    async def read(self) -> FleetFigures:
        """Return the figures since the last reset.

        Raises:
            TargetError: The server has no such figures.
            WireError: There is no answer.
        """
        answer = await call_json(self._endpoint, self._target, "GET", "/emulation/stats", [])
        values: dict[str, float] = {}
        for field in fields(FleetFigures):
            value = answer.get(field.name) if isinstance(answer, dict) else None
            if not isinstance(value, int | float) or not isfinite(value):
                url = f"{self._target.url}/emulation/stats"
                raise TargetError(f"GET {url}: no number {field.name} in the answer")
            values[field.name] = value
        return FleetFigures(**values)

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()
