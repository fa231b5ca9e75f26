"""What a command prints when it serves: one line for scripts, and at a terminal what to try first."""

import sys
from typing import TYPE_CHECKING

from balanceroute.proxy.wire.addresses import bracketed

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.config import ProxyConfig

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the other way round.


def announce(config: "ProxyConfig", port: int, admin_port: int | None = None) -> None:
    """Print the line that scripts wait for, and at a terminal the commands to try."""
    lines = [announcement(config, port, admin_port)]
    if sys.stdout.isatty():
        lines += greeting(config, port, admin_port)
    print("\n".join(lines), flush=True)  # noqa: T201 - the command's answer.


def announcement(config: "ProxyConfig", port: int, admin_port: int | None = None) -> str:
    """Return the line that a command prints when it serves, at these ports."""
    listening = config.listening
    line = f"listening on {_scheme(config)}://{bracketed(listening.host)}:{port}"
    if admin_port is not None:
        line += f", admin on http://{bracketed(listening.admin_host)}:{admin_port}"
    return line


def greeting(config: "ProxyConfig", port: int, admin_port: int | None = None) -> list[str]:
    """Return commands to try: a request, whether the fleet is ready, and its engines."""
    listening, credentials = config.listening, config.credentials
    url = f"{_scheme(config)}://{_reached(listening.host)}:{port}"
    key = ' -H "Authorization: Bearer $KEY"'
    asks = key if credentials.api_keys or credentials.tenants else ""
    json = "-H 'Content-Type: application/json'"
    body = """-d '{"prompt": "1 2 3", "max_tokens": 8}'"""
    lines = [
        f"  a request:   curl {url}/v1/completions{asks} {json} {body}",
        f"  ready?       curl -i {url}/ready",
    ]
    if admin_port is not None:
        asks = key.replace("KEY", "TOKEN") if credentials.admin_token else ""
        where = f"http://{_reached(listening.admin_host)}:{admin_port}"
        lines.append(f"  its engines: curl {where}/admin/instances{asks}")
    return lines


def _scheme(config: "ProxyConfig") -> str:
    return "http" if config.listening.tls_cert is None else "https"


def _reached(host: str) -> str:
    return bracketed(_ANY_ADDRESS.get(host, host))
