"""Clients as people use them, against a proxy that runs before emulated engines.

    python scripts/check_clients.py [--without-load-tool] [--only NAME,..]

The openai, anthropic, litellm and langchain packages, the requests of Claude Code and Codex, curl, NVIDIA's
aiperf, and requests drawn from vLLM's own openapi.json. Makes virtual environments in build/clients on its first run (1.8 GB from the
package index), starts two proxies (`balanceroute up`), and prints a table of what works. Exits 1 if
anything does not.
"""

import argparse
import json
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.testing.soak.run import held_by_proxy

# The checks themselves stand in a folder, some of them for other environments than this one.
sys.path.insert(0, str(Path(__file__).parent / "client_checks"))

from aiperf_checks import check_aiperf
from curl_checks import check_curl
from kits import (
    OPENAI,
    Result,
    check_frameworks,
    check_schema,
    check_script,
    report,
    run,
)
from wire_checks import check_agents

TOPOLOGY = "emulated-2p8d"
MODEL = "emulated"
KEY = "sk-for-the-check"
GROUPS = ("openai", "frameworks", "agents", "curl", "schema", "aiperf")
_READY = re.compile(r"listening on (http://\S+), admin on (http://\S+)\n")
_READY_S = 30.0
_SCHEMA_EXAMPLES = 40


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its URL, and its admin listener's."""

    url: str
    admin_url: str

    def page(self, path: str) -> object:
        """Return a page of the admin listener."""
        return json.loads(run("curl", "-sS", f"{self.admin_url}{path}").stdout)


@contextmanager
def proxy_up(*flags: str) -> Iterator[Proxy]:
    """Run `balanceroute up` on free ports."""
    command = [sys.executable, "-m", "balanceroute.proxy", "up", TOPOLOGY, "--port=0"]
    command += ["--admin-port=0", "--log=none", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    try:
        readable = select.select([process.stdout], [], [], _READY_S)[0]
        ready = _READY.fullmatch(process.stdout.readline().decode()) if readable else None
        if ready is None:
            raise SystemExit("the proxy did not start")
        yield Proxy(*ready.groups())
    finally:
        process.terminate()
        process.wait(_READY_S)
        process.stdout.close()


def check_openai(proxy: Proxy, strict: Proxy) -> Iterator[Result]:
    """Run the openai package against both."""
    OPENAI.install()
    yield from check_script(OPENAI, "openai", proxy.url, proxy.admin_url, strict.url, KEY)


def check_against_an_engine(proxy: Proxy) -> Iterator[Result]:
    """Compare the proxy with its first prefiller."""
    yield from check_schema(proxy.url, MODEL, _prefiller(proxy), _SCHEMA_EXAMPLES)


def check_wires(proxy: Proxy) -> Iterator[Result]:
    """Send what agents send to the proxy and to its first prefiller."""
    yield from check_agents(proxy.url, _prefiller(proxy), MODEL)


def _prefiller(proxy: Proxy) -> str:
    """Return the URL of the first one."""
    instances = proxy.page("/admin/instances")
    assert isinstance(instances, dict)
    return next(str(one["url"]) for one in instances["instances"] if one["role"] == "prefill")


def check_nothing_is_held(proxy: Proxy) -> Result:
    """Look whether the clients left anything behind."""
    state = proxy.page("/admin/state")
    assert isinstance(state, dict)
    held = held_by_proxy(state["state"])
    return Result("all", "nothing is left behind", str(held) if held else None)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--without-load-tool", action="store_true", help="leave out aiperf, which is large"
    )
    parser.add_argument(
        "--only", default=",".join(GROUPS), metavar="NAME,..", help=f"of {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--flags",
        default="",
        metavar="WORDS",
        help="further flags of the proxies: --flags='--resume=exact --first-token=prefill'",
    )
    arguments = parser.parse_args()
    flags = shlex.split(arguments.flags)
    only = set(arguments.only.split(","))
    if not only <= set(GROUPS):
        parser.error(f"--only: of {', '.join(GROUPS)}")
    if arguments.without_load_tool:
        only.discard("aiperf")
    # So that the proxies end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{KEY}\n")
        # Eight slots, one request on the way to them, and one that waits for that.
        strict_flags = ["--batch=1", "--pool-limit=1", "--queue-limit=1", f"--api-key-file={keys}"]
        with proxy_up(*flags) as proxy, proxy_up(*strict_flags, *flags) as strict:
            groups: dict[str, Iterable[Result]] = {
                "openai": check_openai(proxy, strict),
                "frameworks": check_frameworks(proxy.url, MODEL),
                "agents": check_wires(proxy),
                "curl": check_curl(proxy.url, proxy.admin_url, folder),
                "schema": check_against_an_engine(proxy),
                "aiperf": check_aiperf(proxy.url, folder),
            }
            for name, group in groups.items():
                if name in only:
                    results += group
            results.append(check_nothing_is_held(proxy))
    return 1 if report(results) else 0


if __name__ == "__main__":
    sys.exit(main())
