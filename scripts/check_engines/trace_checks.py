"""A slice of a real trace through real engines, and the proxy's picture of it against theirs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleet import LATE_PULLS, Fleet, Proxy

from balanceroute.traces import TraceRequest, read_trace, write_native

_TRACE = Path(__file__).parents[2] / "traces" / "public" / "azure_2023_conv.csv.gz"
REQUESTS = 240
CONCURRENCY = 12
# Of the mirrored load, relative to the engines'.
MEDIAN_ERROR = 0.02
# Into the tiny model's context of 2,048: a word of a prompt is some four of its tokens.
_PROMPT_PART = 10


def scaled(path: Path, output_part: int) -> None:
    """Write the slice, each answer divided by `output_part`."""
    requests = [request for request in read_trace(_TRACE) if request.output_tokens][:REQUESTS]
    write_native(
        path,
        [
            TraceRequest(
                request.arrival_ns,
                max(1, request.prompt_tokens // _PROMPT_PART),
                max(1, request.output_tokens // output_part),
            )
            for request in requests
        ],
    )


class TraceChecks:
    """The checks, in the order in which they run. The name of a method is what it claims.

    Attributes:
        output_part: What answers are divided by.
    """

    output_part = 1

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loads = fleet.folder / "loads.jsonl"

    def check_a_trace_slice_is_served_without_an_error(self) -> str:
        with self._fleet.proxy("trace", "--load-log", str(self._loads)) as proxy:
            report = self._replay(proxy)
        assert report["finished"] == REQUESTS, report
        return (
            f"{REQUESTS} requests of the Azure conversation trace, "
            f"{report['output_tokens_per_s']:.0f} tokens/s"
        )

    def check_the_mirrored_load_is_the_engines(self) -> str:
        report = self._validated()
        started, fit = report["started"], report["fit"]
        assert started["p50"] <= MEDIAN_ERROR, f"the median error is {started['p50']:.1%}"
        lags = ", ".join(f"{rank['lag']['lag_ms']:+.0f} ms" for rank in report["ranks"])
        return (
            f"median error {started['p50']:.2%} of {started['samples']} samples, lag {lags}; "
            f"T = {fit['base_ms']:.1f} ms + {fit['us_per_token']:.2f} us x max L, R2 {fit['r2']:.2f}"
        )

    def _validated(self) -> dict[str, Any]:
        """Return what `balanceroute validate` says of the trace slice."""
        figures = self._fleet.folder / "validate.json"
        command = [sys.executable, "-m", "balanceroute.proxy", "validate"]
        command += ["--steps", str(self._fleet.steps), "--log", str(self._loads)]
        command += ["--min-tokens", "50", "--json", str(figures)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
        assert done.returncode == 0, done.stderr[-1000:]
        report: dict[str, Any] = json.loads(figures.read_text())
        return report

    def _replay(self, proxy: Proxy) -> dict[str, float]:
        trace = self._fleet.folder / "slice.jsonl"
        scaled(trace, self.output_part)
        out = self._fleet.folder / "replay.json"
        command = [sys.executable, "-m", "balanceroute.proxy", "replay", "--target", proxy.url]
        command += ["--trace", str(trace), "--concurrency", str(CONCURRENCY), "--json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300.0, check=False)
        assert done.returncode == 0, done.stderr[-1000:]
        (result,) = json.loads(out.read_text())["results"]
        figures: dict[str, float] = result
        assert figures["errors"] == 0, figures
        for prefiller in self._fleet.prefillers:
            late = prefiller.metric(LATE_PULLS)
            assert not late, f"{late:.0f} KV caches were pulled after their lease"
        return figures
