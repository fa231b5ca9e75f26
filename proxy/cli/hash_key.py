"""`balanceroute hash-key`: print what a file of tenants has of a key.

The key comes from standard input, because every user of the machine can read a command line.
"""

import argparse
import sys
from codecs import BOM_UTF8

from balanceroute.proxy.core.errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "hash-key",
        help="print the SHA-256 of a key for a file of tenants",
        description="Print the SHA-256 of each key on standard input, one a line, for key_sha256 in "
        "a file of tenants (balanceroute serve --tenants).",
        epilog="A hash hides only a key that nobody can guess: openssl rand -hex 32 makes one.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    del arguments
    # Here, so that the other subcommands start without it.
    from balanceroute.proxy.live.security import as_secret, digest_of  # noqa: PLC0415

    lines = sys.stdin.buffer.read().removeprefix(BOM_UTF8).split(b"\n")
    if not lines[-1]:  # The end of the last line.
        lines.pop()
    if not lines:
        raise ConfigError("standard input holds no key")
    for number, line in enumerate(lines, start=1):
        try:
            key = as_secret(line.removesuffix(b"\r"))
        except ConfigError as error:
            raise ConfigError(f"standard input: line {number}: {error}") from None
        sys.stdout.write(f"{digest_of(key.value).value.decode()}\n")
    return 0
