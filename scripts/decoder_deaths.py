"""Kills decode engines under greedy streams, in virtual time, and says what the clients got.

    scripts/decoder_deaths.py --requests 2000 --resume exact
    scripts/decoder_deaths.py --requests 2000 --resume off
    scripts/decoder_deaths.py --requests 2000 --agents 1    # messages, responses and chats with tools and thoughts

Every answer is compared with that of one engine. A stream under which two engines die is not continued: it
ends with an error. Exits with 1 if an answer is wrong, if more than two engines died under a request, or
if a request is left.
"""

import argparse
import sys
from statistics import median

from balanceroute.proxy.live.request.resume import Resume
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.deaths import kill_decoders


def main() -> int:
    """Run, and print what came of it; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=positive, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--agents",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="as agents ask, with tools and thoughts",
    )
    parser.add_argument("--resume", choices=[one.value for one in Resume], default="exact")
    arguments = parser.parse_args()
    found = kill_decoders(
        arguments.seed,
        requests=arguments.requests,
        resume=arguments.resume,
        agents=arguments.agents,
    )
    print(
        f"{found.killed} decode engines killed under {arguments.requests} greedy streams: "
        f"{found.hit} streams hit, {found.exact} exact, {found.failed} ended with an error "
        f"({found.twice} of them with the second engine that died under it), {len(found.wrong)} wrong, {found.held} left"
    )
    if found.gaps_s:
        worst = max(found.gaps_s)
        print(
            f"longest gap of a stream that went on: median {median(found.gaps_s):.2f} s, at most {worst:.2f} s"
        )
    for wrong in found.wrong:
        print(f"  {wrong}")
    return 1 if found.wrong or found.held else 0


if __name__ == "__main__":
    sys.exit(main())
