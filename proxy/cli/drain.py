"""`balanceroute drain`: have a proxy send nothing more to an engine, and wait until it is idle.

With a deadline, what is still there then goes on elsewhere, as far as it can.

For hooks that run before an engine ends, as a pod's preStop.
"""

import argparse
import json
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_url import EngineUrl

_ROLES = ("prefill", "decode")
_ANSWER_S = 10.0
_TIMEOUT = 504


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
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
    """Run the command.

    Raises:
        ConfigError: An address is none, or the proxy does not do it.
    """
    # Here, so that the other subcommands start without them.
    from balanceroute.proxy.live.engines.engine_url import EngineUrl  # noqa: PLC0415
    from balanceroute.proxy.live.security.credentials import read_secret  # noqa: PLC0415

    url = _address(EngineUrl, "URL", arguments.url)
    headers = {"content-type": "application/json"}
    if arguments.token_file is not None:
        try:
            token = read_secret(arguments.token_file).value.decode()
        except ConfigError as error:
            raise ConfigError(f"--token-file {error}") from None
        headers["authorization"] = f"Bearer {token}"
    admin = _Admin(_address(EngineUrl, "--admin", arguments.admin), headers)
    role = arguments.role or _role(admin, url.base)
    order: dict[str, object] = {"role": role, "url": url.base}
    wait_s = arguments.timeout_s if arguments.wait else 0.0
    if wait_s:
        order["wait_s"] = wait_s
    if arguments.deadline_s is not None:
        order["deadline_s"] = arguments.deadline_s
    status, answer = admin.ask(
        "POST", "/admin/instances/drain", order, timeout_s=wait_s + _ANSWER_S
    )
    if status not in (200, _TIMEOUT):
        raise ConfigError(answer["error"]["message"])
    if status == _TIMEOUT:
        print(f"balanceroute: {answer['error']['message']}", file=sys.stderr)  # noqa: T201
        return 1
    word = "is drained" if arguments.wait else "gets nothing new"
    print(f"{url.base} ({role}) {word}")  # noqa: T201 - the command's answer.
    return 0


class _Admin:
    """The admin listener at an address."""

    def __init__(self, address: "EngineUrl", headers: dict[str, str]) -> None:
        self._address, self._headers = address, headers

    def ask(
        self, method: str, path: str, order: object = None, *, timeout_s: float = _ANSWER_S
    ) -> tuple[int, Any]:
        """Return the status and the content of a page. Raises ConfigError: it has none."""
        connection = HTTPConnection(self._address.host, self._address.port, timeout=timeout_s)
        try:
            body = None if order is None else json.dumps(order)
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigError(f"--admin {self._address}: {str(error) or 'no answer'}") from None
        finally:
            connection.close()


def _address(kind: "type[EngineUrl]", name: str, word: str) -> "EngineUrl":
    try:
        return kind.parse(word)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None


def _role(admin: _Admin, url: str) -> str:
    status, answer = admin.ask("GET", "/admin/instances")
    if status != 200:
        raise ConfigError(answer["error"]["message"])
    roles = {row["role"] for row in answer["instances"] if row["url"] == url}
    if len(roles) != 1:
        raise ConfigError(f"there is no engine {url}" if not roles else f"{url}: give --role")
    return str(roles.pop())
