"""Runs the whole proxy in virtual time against emulated engines, with faults drawn from seeds.

    scripts/chaos.py --seeds 500 --requests 100 --jobs 2
    scripts/chaos.py --seed 17 --requests 100 --log 17.log
    scripts/chaos.py --seeds 100 --groups
    scripts/chaos.py --seeds 100 --http3

With --groups there are several groups of engines behind the proxy, with aliases and fall-back chains, and
groups are drained, removed and added while requests run. With --http3 clients speak HTTP/3 over links that
lose, repeat, delay and corrupt packets.

The same seed with the same number of requests does the same thing again, whatever it was.
"""

import argparse
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.certificate import make_certificate
from balanceroute.proxy.testing.chaos.groups import run_seed_of_groups
from balanceroute.proxy.testing.chaos.trial import Summary, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.testing.chaos.trial import TrialReport


def main() -> int:
    """Run seeds and print a table; return 1 if any violated anything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=positive, default=20, metavar="N", help="how many seeds")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one alone")
    parser.add_argument("--requests", type=positive, default=100, metavar="N", help="of each seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    parser.add_argument(
        "--force",
        choices=["locality"],
        help="in every seed: prefix-aware choice, ranks that compute prompts, conversations, two versions",
    )
    parser.add_argument("--groups", action="store_true", help="several groups of engines")
    parser.add_argument("--http3", action="store_true", help="clients speak HTTP/3 (extra h3)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what happened in the one seed")
    arguments = parser.parse_args()
    if arguments.log is not None and arguments.seed is None:
        parser.error("--log goes with --seed")
    alone = [flag for flag in ("groups", "http3") if getattr(arguments, flag)]
    if alone and (arguments.force or len(alone) > 1):
        parser.error(f"--{alone[0]} goes with none of the other kinds of runs")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    begin = time.perf_counter()
    summary = Summary()
    # Fresh processes: what one run leaves in memory can then be of no consequence to another.
    with (
        TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool,
    ):
        run: Callable[[int], TrialReport] = partial(
            run_seed,
            requests=arguments.requests,
            near=arguments.force == "locality",
        )
        if arguments.groups:
            run = partial(run_seed_of_groups, requests=arguments.requests)
        if arguments.http3:
            # Here: an extra.
            from balanceroute.proxy.testing.chaos.http3_trial import (  # noqa: PLC0415
                run_seed_over_http3,
            )

            cert, key = make_certificate(Path(folder), kind="ed25519")
            run = partial(run_seed_over_http3, requests=arguments.requests, cert=cert, key=key)
        for report in pool.imap_unordered(run, seeds):
            summary.add(report)
            if report.violations:
                print(f"seed {report.seed}: {report.violations[0]}", file=sys.stderr)
            if arguments.log is not None:
                arguments.log.write_text("\n".join([*report.lines, ""]))
    print("\n".join(summary.lines()))
    print(f"took            {time.perf_counter() - begin:.0f} s, {arguments.jobs} jobs")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
