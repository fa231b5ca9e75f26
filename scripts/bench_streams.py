"""What an open stream costs the proxy in memory: many at a time, on slow steps, every event checked.

Prints the resident memory before and at its peak, and the descriptors that are left behind. Streams are
opened one after the other and are all open in the end. Each takes two descriptors of its process, and two
more while the native library moves it, so 10,000 need a hard limit of 42,000 open files (`ulimit -Hn`), or
the right to raise it; 22,000 with `--native off`.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from balanceroute.proxy.testing.arguments import positive

# Its parts stand in a folder.
sys.path.insert(0, str(Path(__file__).parent / "proxy_bench"))

from processes import rss_mb
from targets import KNOWN, ROOT, Target, engine, router, targets

_PUMPED = re.compile(r"^balanceroute_pumped_events_total (\S+)$", re.MULTILINE)
_POLL_S = 0.2
# The client's connection and the decode rank's, and the native library's copies of them.
_PER_STREAM, _PER_PUMPED = 2, 2
# The prefillers', kept for other streams: up to 1,024 of them, more for moments. And its own.
_SPARE_DESCRIPTORS = 2_000
_OPENED_PER_S = 250


def main() -> int:
    """Run the benchmark; return 1 if anything was dropped or reordered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=positive, default=10_000, metavar="N")
    parser.add_argument("--policy", default="br-h", help="of balanceroute (default: br-h)")
    parser.add_argument(
        "--native",
        choices=["auto", "off", "require"],
        default="auto",
        help="whether balanceroute's native library moves them (default: auto)",
    )
    parser.add_argument(
        "--step-s", type=float, default=5.0, metavar="S", help="between events (default: 5)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=1,
        metavar="N",
        help="of each stream, at least (default: so many that all are open at a time)",
    )
    parser.add_argument(
        "--router",
        type=router,
        action="append",
        default=[],
        metavar="NAME[=COMMAND]",
        help=f"a router to compare with: {', '.join(KNOWN)}, or as for bench_proxy.py",
    )
    arguments = parser.parse_args()
    count = arguments.streams
    each = _PER_STREAM + _PER_PUMPED * (arguments.native != "off")
    needed = allow_descriptors(count, each * count + _SPARE_DESCRIPTORS)
    if needed:
        parser.error(needed)
    # None is to end before the last one is open.
    tokens = max(arguments.tokens, round(count / _OPENED_PER_S / arguments.step_s) + 3)
    flags = ["--policy", arguments.policy, "--native", arguments.native]
    flags += ["--connection-limit", str(count + _SPARE_DESCRIPTORS)]
    for limit in ("--batch", "--queue-limit", "--pool-limit"):
        flags += [limit, str(2 * count)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-streams-") as logs,
        engine(1e3 * arguments.step_s) as behind,
        targets(behind, flags, Path(logs), against=None, routers=arguments.router) as all_targets,
    ):
        exact = [measure(count, tokens, target) for target in all_targets]
    return int(not all(exact))


def allow_descriptors(count: int, needed: int) -> str:
    """Allow this process and those it starts what so many streams need; return why that fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(hard, needed)))
    except (OSError, ValueError):
        return f"{count} streams need {needed} open files, the hard limit is {hard} (ulimit -Hn)"
    return ""


def measure(count: int, tokens: int, target: Target) -> bool:
    """Open the streams through one target, and print what each costs; return whether all went well."""
    if target.process is None:
        return True
    before_mb = peak_mb = rss_mb(target.process)
    files = Path(f"/proc/{target.process.pid}/fd")
    before = most = len(os.listdir(files))
    client = [sys.executable, str(ROOT / "scripts" / "bench_client.py"), "--port", str(target.port)]
    client += ["--connections", str(count), "--requests", str(count), "--tokens", str(tokens)]
    client += ["--opened-per-s", str(_OPENED_PER_S)]
    with subprocess.Popen(client, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak_mb = max(peak_mb, rss_mb(target.process))
            most = max(most, len(os.listdir(files)))
            time.sleep(_POLL_S)
        assert process.stdout is not None
        figures = json.loads(process.stdout.read())
    print(
        f"{target.name}: {count:,} streams of {tokens} events in {figures['seconds']:.0f} s, "
        f"{figures['errors']} errors; RSS {before_mb:.0f} to {peak_mb:.0f} MB, "
        f"{(peak_mb - before_mb) * 1024 / count:.1f} KB a stream; {most:,} descriptors, {before} before and "
        f"{len(os.listdir(files))} now; {moved_natively(target):,} events moved natively",
        flush=True,
    )
    exact: bool = figures["errors"] == 0 and figures["events"] == count * tokens
    return exact


def moved_natively(target: Target) -> int:
    """Return the events of balanceroute that its native library has moved; 0 of any other router."""
    try:
        with urlopen(f"http://127.0.0.1:{target.port}/metrics", timeout=30) as page:
            found = _PUMPED.search(page.read().decode())
    except OSError:
        return 0
    return 0 if found is None else int(float(found[1]))


if __name__ == "__main__":
    sys.exit(main())
