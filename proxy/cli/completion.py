"""`balanceroute completion`: what has a shell complete commands, flags and files; needs the extra completion."""

import argparse
import sys

from balanceroute.proxy.core.errors import ConfigError

_SHELLS = ("bash", "zsh")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print what has a shell complete the command line",
        description="Print a script that has a shell complete commands, flags, choices and files. For bash, source it "
        "from ~/.bashrc; for zsh, write it to a file _balanceroute in a folder of $fpath.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=_SHELLS, help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    # Here, as it asks for the parsers of all commands.
    from balanceroute.proxy.cli.command_line import make_parser  # noqa: PLC0415

    try:
        import shtab  # noqa: PLC0415
    except ImportError:
        reason = "needs the extra completion: pip install '.[completion]'"
        raise ConfigError(f"completion: {reason}") from None
    parser = make_parser()
    _offer_files(parser, shtab.FILE)
    sys.stdout.write(f"{shtab.complete(parser, arguments.shell)}\n")
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _offer_files(below, files)
            continue
        if isinstance(action.choices, dict):  # shtab takes a mapping for commands.
            action.choices = [*action.choices]
        if str(action.metavar) in ("FILE", "OUT", "DIR", "FOLDER", "TOPOLOGY"):
            action.complete = files  # type: ignore[attr-defined]
