"""Clients that leave and engines that fail, on real sockets: is anything left behind?

    python scripts/soak.py [--requests 5000] [--seed 0] [--connector NAME] [--policy NAME] [--native MODE]

Starts emulated engines and the proxy as processes of their own and sends them requests, a fifth of
which are left in the middle while engines fail, die and come back, all as in a chaos run. Every
answer is compared with that of an engine which nothing is wrong with. Then all clients go, and
whatever the proxy or the engines still hold is an error. Prints a table; exits 1 if anything is wrong.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.soak.run import SoakSettings, soak


def main() -> int:
    """Run the soak of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=positive, default=5000, help="how many to send")
    parser.add_argument("--seed", type=int, default=0, help="decides requests and faults")
    parser.add_argument("--connector", default="nixl", help="how KV caches travel")
    parser.add_argument("--policy", default="br-h", help="of the proxy")
    parser.add_argument(
        "--native",
        choices=["auto", "off", "require"],
        default="auto",
        help="whether the native library moves streams (default: auto)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the proxy's logs there")
    arguments = parser.parse_args()
    # So that the other processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings = SoakSettings(
        requests=arguments.requests,
        warm_up=max(10, arguments.requests // 25),
        afterwards=max(10, arguments.requests // 50),
        seed=arguments.seed,
        wait_for_idle=True,
        connector=arguments.connector,
        policy=arguments.policy,
        native=arguments.native,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = soak(settings, folder)
    print(report.text())
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
