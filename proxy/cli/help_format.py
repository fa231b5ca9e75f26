"""How `--help` looks."""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not those that the help text tells already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)
