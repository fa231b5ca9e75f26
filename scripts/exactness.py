"""Compares the proxy's answers with those of one engine, byte for byte, in virtual time.

    scripts/exactness.py --requests 2000

For each way of moving KV caches, so that many requests are drawn of every shape that a client may
send. Exits with 1 if any answer differs.
"""

import argparse
import sys
import time

from balanceroute.proxy.live.request.leg_settings import FirstTokenFrom, Resume
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.exactness import compare
from balanceroute.topologies import CONNECTORS


def main() -> int:
    """Compare, and print a line for each connector; return 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=positive, default=2000, metavar="N", help="for each connector"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--resume", choices=[one.value for one in Resume], default="off")
    parser.add_argument(
        "--first-token", choices=[one.value for one in FirstTokenFrom], default="decode"
    )
    arguments = parser.parse_args()
    differences, first_token = 0, FirstTokenFrom(arguments.first_token)
    for connector, facts in CONNECTORS.items():
        if first_token is FirstTokenFrom.PREFILL and not facts.says_first:
            print(f"{connector:20} refuses a prefiller's first token")
            continue
        begin = time.perf_counter()
        found = compare(
            arguments.seed,
            requests=arguments.requests,
            connector=connector,
            resume=Resume(arguments.resume),
            first_token=first_token,
        )
        differences += len(found.differences)
        statuses = ", ".join(f"{count} of {one}" for one, count in sorted(found.statuses.items()))
        print(
            f"{connector:20} {found.requests} requests ({statuses}): {found.identical} the "
            f"same bytes, {found.interleaved} the same for each choice, "
            f"{len(found.differences)} different; {found.early} first tokens came early; {time.perf_counter() - begin:.1f} s"
        )
        for difference in found.differences:
            print(f"  {difference}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
