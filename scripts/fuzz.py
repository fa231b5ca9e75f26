"""Sends hostile requests to the whole proxy in virtual time, and an honest one after each.

    scripts/fuzz.py --cases 300000 --jobs 2
    scripts/fuzz.py --seed 17 --cases 2000

Cases are drawn from seeds, 2,000 of each. Exits with 1 if the proxy made an answer of 500 or more,
refused without a reason, or answered an honest request wrongly.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial

from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.fuzz import fuzz

_CASES_OF_A_SEED = 2_000


def main() -> int:
    """Send, and print a table; return 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=positive, default=20_000, metavar="N", help="how many in all"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="this seed alone")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    arguments = parser.parse_args()
    each = min(arguments.cases, _CASES_OF_A_SEED)
    seeds = range(arguments.first, arguments.first + -(-arguments.cases // each))
    if arguments.seed is not None:
        each, seeds = arguments.cases, range(arguments.seed, arguments.seed + 1)
    begin = time.perf_counter()
    kinds: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    cases = violations = 0
    # Fresh processes: what one run leaves in memory can then be of no consequence to another.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for report in pool.imap_unordered(partial(fuzz, cases=each), seeds):
            cases += report.cases
            kinds += report.kinds
            statuses += report.statuses
            violations += len(report.violations)
            for violation in report.violations:
                print(f"seed {report.seed}: {violation}", flush=True)
    print(f"cases       {cases} of {len(seeds)} seeds, as many canaries")
    print(f"spoiled     {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}")
    print(f"statuses    {', '.join(f'{status}: {n}' for status, n in sorted(statuses.items()))}")
    print(f"violations  {violations}")
    print(f"took        {time.perf_counter() - begin:.0f} s, {arguments.jobs} jobs")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
