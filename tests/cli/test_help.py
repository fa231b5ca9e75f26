"""Help that a newcomer reads from the top."""

import pytest

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.command_line import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_leaves_the_screen_to_what_a_command_is_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith(f"usage: balanceroute {command}")
    assert usage.count("\n") < 10, usage
