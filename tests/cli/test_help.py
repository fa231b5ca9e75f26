"""Help that a newcomer reads from the top: a screen of each command, and an example that works."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.command_line import COMMANDS, EXAMPLES, Parser, make_parser

SCREEN_LINES = 40


def parsers(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    """Yield a parser and those below it."""
    assert isinstance(parser, Parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


ALL = {parser.prog: parser for parser in parsers(make_parser())}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_leaves_the_screen_to_what_a_command_is_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith(f"usage: balanceroute {command}")
    assert usage.count("\n") < 10, usage


@pytest.mark.parametrize("prog", ALL)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_help_fits_a_screen(
    prog: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = prog.split()[1:]
    said = ""
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as exit_:
            main([*words, flag])
        assert exit_.value.code == 0
        said = capsys.readouterr().out
        assert said.count("\n") <= SCREEN_LINES
        assert "None" not in said
        assert "%(" not in said
    with pytest.raises(SystemExit):
        main([*words, "--help-all"])
    whole = capsys.readouterr().out
    assert whole.count("\n") <= SCREEN_LINES or f"{prog} --help-all" in said
    assert whole == ALL[prog].format_help()


@pytest.mark.parametrize("words", EXAMPLES)
def test_an_example_is_shown_and_can_be_typed(words: str) -> None:
    parser = ALL[f"balanceroute {words}"]
    assert parser.example in parser.screen()
    typed = shlex.split(re.split("[<>]", parser.example)[0])[1:]
    make_parser([typed[0]]).parse_args(typed)


def test_every_command_has_an_example() -> None:
    leaves = [
        prog
        for prog, parser in ALL.items()
        if not any(isinstance(one, argparse._SubParsersAction) for one in parser._actions)
    ]
    assert sorted(leaves) == sorted(f"balanceroute {words}" for words in EXAMPLES)
