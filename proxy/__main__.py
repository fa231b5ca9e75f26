"""The command line: `balanceroute`, or `python -m balanceroute.proxy`."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 130 if it was interrupted."""
    try:
        # An interrupt is none the less one while this is imported.
        from balanceroute.proxy.cli.command_line import run  # noqa: PLC0415

        return run(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
