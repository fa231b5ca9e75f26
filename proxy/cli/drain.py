"""`balanceroute drain`: have a proxy send nothing more to an engine, and wait until it is idle.

With a deadline, what is still there then goes on elsewhere, as far as it can.

For hooks that run before an engine ends, as a pod's preStop.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_url import EngineUrl
    from balanceroute.proxy.page_client import Answer, PageClient

_ROLES = ("prefill", "decode")
_ANSWER_S = 10.0
_TIMEOUT = 504


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "drain",
        help="send nothing more to an engine, and wait until it is idle",
        description=__doc__,
        epilog="The status is 0 when the engine is drained, 1 when requests are in flight on it "
        "still, and 2 when it could not be ordered.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("url", metavar="URL", help="the engine's address, as the proxy knows it")
    parser.add_argument(
        "--role", choices=_ROLES, help="what it does (default: what the proxy says of the address)"
    )
    parser.add_argument(
        "--admin",
        metavar="URL",
        default="http://127.0.0.1:9000",
        help="the admin listener of the proxy (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token of administrators"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="verifies an https:// listener's certificate (default: the system's authorities)",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="until its last request has ended and the last KV cache that it holds was pulled",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        metavar="S",
        help="after so many seconds, have requests go on at other engines: those whose answers have not "
        "begun, and streams that --resume of the proxy continues (default: never)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="with --wait, how long at most (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    # Here, so that the other subcommands start without them.
    from balanceroute.proxy.live.engines.engine_url import EngineUrl  # noqa: PLC0415
    from balanceroute.proxy.page_client import PageClient  # noqa: PLC0415

    url = _address(EngineUrl, "URL", arguments.url)
    admin = _address(EngineUrl, "--admin", arguments.admin)
    pages = PageClient.of_flags(arguments.ca_file, arguments.token_file, timeout_s=_ANSWER_S)
    return asyncio.run(_drain(arguments, url.base, _Admin(admin.base, pages)))


async def _drain(arguments: argparse.Namespace, url: str, admin: "_Admin") -> int:
    wait_s = arguments.timeout_s if arguments.wait else 0.0
    async with admin.pages:
        role = arguments.role or await admin.role(url)
        order: dict[str, object] = {"role": role, "url": url}
        if wait_s:
            order["wait_s"] = wait_s
        if arguments.deadline_s is not None:
            order["deadline_s"] = arguments.deadline_s
        answer = await admin.ask(
            "POST", "/admin/instances/drain", order, timeout_s=wait_s + _ANSWER_S
        )
    if answer.status == _TIMEOUT:
        print(f"balanceroute: {admin.reason(answer)}", file=sys.stderr)  # noqa: T201
        return 1
    if answer.status != 200:
        raise ConfigError(admin.reason(answer))
    word = "is drained" if arguments.wait else "gets nothing new"
    print(f"{url} ({role}) {word}")  # noqa: T201 - the command's answer.
    return 0


class _Admin:
    def __init__(self, address: str, pages: "PageClient") -> None:
        self._address, self.pages = address, pages

    async def ask(
        self, method: str, path: str, order: object = None, *, timeout_s: float = _ANSWER_S
    ) -> "Answer":
        """Return an answer. Raises ConfigError: there is none."""
        from balanceroute.proxy.page_client import UnansweredError  # noqa: PLC0415

        try:
            return await self.pages.ask(
                method, self._address + path, json=order, timeout_s=timeout_s
            )
        except UnansweredError as error:
            raise ConfigError(f"--admin {self._address}: {error}") from None

    async def role(self, url: str) -> str:
        """Return what an engine does. Raises ConfigError: it is not known, or does both."""
        answer = await self.ask("GET", "/admin/instances")
        if answer.status != 200:
            raise ConfigError(self.reason(answer))
        try:
            roles = {row["role"] for row in answer.json()["instances"] if row["url"] == url}
        except (ValueError, LookupError, TypeError):
            raise ConfigError(self._stranger(answer)) from None
        if len(roles) != 1:
            raise ConfigError(f"there is no engine {url}" if not roles else f"{url}: give --role")
        return str(roles.pop())

    def reason(self, answer: "Answer") -> str:
        """Return what an answer of another status than 200 says."""
        try:
            return str(answer.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return self._stranger(answer)

    def _stranger(self, answer: "Answer") -> str:
        return f"--admin {self._address}: status {answer.status}, and no answer of a proxy"


def _address(kind: "type[EngineUrl]", name: str, word: str) -> "EngineUrl":
    try:
        return kind.parse(word)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None
