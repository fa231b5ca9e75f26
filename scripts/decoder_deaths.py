"""Kills decode engines under greedy streams, in virtual time, and says what the clients got.

    scripts/decoder_deaths.py --requests 2000 --resume exact
    scripts/decoder_deaths.py --requests 2000 --resume off
    scripts/decoder_deaths.py --requests 2000 --agents 1    # messages, responses and chats with tools and thoughts
    scripts/decoder_deaths.py --freeze 3600 --resume exact

Every answer is compared with that of one engine. A stream under which two engines die is not continued: it
ends with an error. Exits with 1 if an answer is wrong, if more than two engines died under a request, or
if a request is left.

With --freeze ranks stop for a while instead, each by itself or all at a barrier, beside others that are slow,
send in bursts, or pause for a moment, and the proxy stands still at times. The script says how long it takes
until a frozen rank is left out. Exits with 1 if one is not in time, or one that did not stand still is.
"""

import argparse
import sys
from statistics import median

from balanceroute.proxy.live.request.leg_settings import Resume
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.deaths import freeze_ranks, kill_decoders


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
    parser.add_argument("--freeze", type=positive, metavar="S", help="for so many virtual seconds")
    arguments = parser.parse_args()
    if arguments.freeze is not None:
        return _freeze(arguments)
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


def _freeze(arguments: argparse.Namespace) -> int:
    found = freeze_ranks(arguments.seed, seconds=arguments.freeze, resume=arguments.resume)
    print(
        f"{found.requests} requests in {arguments.freeze} s; {found.frozen} ranks frozen under streams, "
        f"{found.paused} pauses of a rank, {found.held} standstills of all ({found.told} told), "
        f"{found.stood} of the proxy"
    )
    if found.found_s:
        beyond = max(out - limit for out, limit in zip(found.found_s, found.limits_s, strict=False))
        print(
            f"left out after {median(found.found_s):.2f} s in the median, at most {max(found.found_s):.2f} s, "
            f"and at most {beyond:.2f} s behind the limit of its own pace"
        )
    if found.gaps_s:
        print(
            f"{len(found.gaps_s)} streams went on elsewhere; longest silence: median "
            f"{median(found.gaps_s):.2f} s, at most {max(found.gaps_s):.2f} s"
        )
    print(
        f"{len(found.missed)} not left out in time, {len(found.false)} left out without reason, "
        f"{len(found.wrong)} answers wrong or lost, {found.left} left"
    )
    for line in (*found.missed, *found.false, *found.wrong):
        print(f"  {line}")
    return 1 if found.missed or found.false or found.wrong or found.left else 0


if __name__ == "__main__":
    sys.exit(main())
