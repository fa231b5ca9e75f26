"""What the proxy costs, side by side with other routers, another checkout of itself, and no proxy.

All run against the same engine, in turns within one run, and every event is checked on its way. CPU
time is the process's own and its children's; ratios are taken within a turn, so that what else the
machine does hits both alike. Every proxy logs to a file, as its users let it. vllm-router and smg are
installed into build/bench-venv on first use.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from balanceroute.proxy.testing.arguments import positive

# Its parts stand in a folder.
sys.path.insert(0, str(Path(__file__).parent / "proxy_bench"))

from loads import Load, loads, measure
from processes import on_cores
from table import report
from targets import (
    KNOWN,
    Engine,
    Target,
    checkout,
    engine,
    interpreter,
    router,
    targets,
)

__all__ = ["Load", "loads", "main"]

_STEP_MS = 20.0


def main() -> int:
    """Run the benchmark; return 1 if anything was dropped or reordered."""
    parser = _parser()
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else arguments.repeats
    all_loads = loads(quick=arguments.quick, stalled=arguments.stalled)
    plan = [load for load in all_loads if arguments.only in load.name]
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[:1], cores[1:]) if arguments.pin else (cores, cores)
    if not others:
        parser.error("--pin needs two cores")
    if not plan:
        parser.error(f"no load has {arguments.only} in its name")
    routers = arguments.router or [KNOWN["vllm-router"]]
    if arguments.no_router or (arguments.against is not None and not arguments.router):
        routers = []
    flags = ["--policy", arguments.policy, "--predictor", arguments.predictor]
    flags += ["--batch", str(arguments.slots), "--pool-limit", "4096"]
    with (
        tempfile.TemporaryDirectory(prefix="bench-proxy-") as logs,
        on_cores(others),
        engine(arguments.step_ms, ranks=arguments.ranks, slots=arguments.slots) as behind,
        on_cores(own),
        targets(
            behind,
            flags,
            Path(logs),
            against=arguments.against,
            routers=routers,
            without_native=arguments.without_native,
            stalled=arguments.stalled,
            traces=arguments.traces,
            pythons=arguments.python,
            floor=arguments.floor,
        ) as all_targets,
        on_cores(others),
    ):
        rows = _run(plan, all_targets, behind, repeats)
    report(rows, plan, policy=arguments.policy, ranks=arguments.ranks, slots=arguments.slots)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["errors"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=5, metavar="N")
    parser.add_argument("--policy", default="br-h", help="of balanceroute (default: br-h)")
    parser.add_argument("--predictor", default="survival", help="of br-h (default: survival)")
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="decode ranks (default: 1, where nothing is chosen)",
    )
    parser.add_argument(
        "--slots",
        type=positive,
        default=2048,
        metavar="N",
        help="streams at a time on each rank; others wait, in balanceroute's pool or in the engine "
        "(default: 2048, room for every load)",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=_STEP_MS,
        metavar="MS",
        help=f"of the engine between a stream's events (default: {_STEP_MS:g}); with 1 there are no pauses",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, 2 repeats")
    parser.add_argument("--only", default="", metavar="TEXT", help="loads with this in their name")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="run the proxies on the first core, the engine and the clients on the others",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    _add_targets(parser)
    return parser


def _add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        type=router,
        action="append",
        metavar="NAME[=COMMAND]",
        help=f"a router to compare with: {', '.join(KNOWN)}, or any other one by its command, in which "
        "{port}, {metrics_port}, {prefill} and {decode} stand for ports and URLs, and a word with {decode} "
        "is repeated for each rank; may be given more than once (default: vllm-router)",
    )
    parser.add_argument("--no-router", action="store_true", help="without any other router")
    parser.add_argument(
        "--without-native",
        action="store_true",
        help="balanceroute with --native off too: all others use the native library, if it is installed",
    )
    parser.add_argument(
        "--stalled",
        action="store_true",
        help="long streams alone, and balanceroute too with a thread that holds Python for 50 ms ten times a second",
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="a native relay too, which moves bytes and reads none (needs cargo)",
    )
    parser.add_argument(
        "--traces", action="store_true", help="balanceroute with a trace of every request too"
    )
    parser.add_argument(
        "--python",
        type=interpreter,
        action="append",
        default=[],
        metavar="PATH",
        help="balanceroute run by another interpreter too, which has the packages that it needs; "
        "may be given more than once",
    )
    parser.add_argument(
        "--against",
        type=checkout,
        metavar="TREE",
        help="another checkout of this repository, whose proxy is compared instead of vllm-router",
    )


def _run(
    plan: list[Load], all_targets: list[Target], behind: Engine, repeats: int
) -> list[dict[str, Any]]:
    """Send every load to every target, in turns; return the figures."""
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=repeats * len(plan) * len(all_targets))
        for turn in range(repeats):
            for load in plan:
                shift = turn % len(all_targets)
                for target in all_targets[shift:] + all_targets[:shift]:
                    bar.update(task, description=f"{load.name}, {target.name}")
                    rows.append({"turn": turn} | measure(load, target, behind))
                    bar.advance(task)
    return rows


if __name__ == "__main__":
    sys.exit(main())
