"""Settings as they are declared: each kind, its range, and what components get of them."""

import argparse
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from balanceroute.proxy.cli import (
    emulate,
    evaluate,
    replay,
    simulate,
    trace_flags,
    train,
    validate,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import (
    choice,
    file,
    flag,
    integer,
    named,
    number,
    part,
    seconds,
    settings_of,
    switch,
    text,
    weights,
)
from balanceroute.proxy.live.settings import declared
from balanceroute.proxy.settings import Given, add_flags, read_flags


class Colour(Enum):
    """What a choice can be."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """A setting of each kind."""

    count: int = integer(3, "a count", 1, 9)
    limit: int | None = integer(None, "a limit", 1, 9, word="none")
    share: float = number(0.5, "100 % is 1", 0, 1)
    bound: float | None = number(None, "a bound", 0, 1)
    wait_s: float = seconds(2.0, "a time")
    colour: Colour | None = choice(None, "a colour", named(Colour), shown_default="any")
    name: str | None = text(None, "a name", metavar="NAME")
    out: Path | None = file("a file")
    on: bool = switch(True, "a switch")
    off: bool = flag("a flag")
    shares: tuple[float, ...] = weights((0.25, 0.5), "shares", metavar="A,B")


ALL: list[type] = [
    *declared.SECTIONS,
    *emulate.SECTIONS,
    *simulate.SECTIONS,
    *replay.SECTIONS,
    *(trace_flags.Chosen, evaluate.QuestionFlags, train.TrainingFlags, validate.SampleFlags),
]


def of_words(*words: str) -> Kinds:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Kinds)
    return read_flags(parser.parse_args(words), Kinds).read(Kinds)


def test_without_flags_every_setting_is_its_default() -> None:
    assert of_words() == Kinds()
    assert (Kinds().count, Kinds().limit, Kinds().on, Kinds().off) == (3, None, True, False)


def test_words_of_the_command_line_become_values() -> None:
    words = "--count 4 --limit 5 --share 1 --bound 0 --wait-s 7 --colour red --name n --out o"
    assert of_words(*words.split(), "--no-on", "--off") == Kinds(
        count=4,
        limit=5,
        share=1.0,
        bound=0.0,
        wait_s=7.0,
        colour=Colour.RED,
        name="n",
        out=Path("o"),
        on=False,
        off=True,
    )
    assert of_words("--limit", "none").limit is None
    assert of_words("--shares", "0.1,0.9").shares == (0.1, 0.9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count=0", "--count is 0, must be from 1 to 9"),
        ("--count=x", "--count is 'x', must be an integer"),
        ("--count=none", "--count is 'none', must be an integer"),
        ("--limit=x", "--limit is 'x', must be an integer, or 'none'"),
        ("--bound=", "--bound is '', must be a number"),
        ("--share=nan", "--share is nan, must be from 0 to 1"),
        ("--name=", "--name is '', must be a text"),
        ("--shares=1", "--shares is '1', must be 2 numbers with a sum above 0 and up to 1"),
        ("--shares=0,0", "--shares is '0,0', must be 2 numbers with a sum above 0 and up to 1"),
        ("--shares=1,nan", "--shares is nan, must be from 0 to 1"),
    ],
)
def test_a_bad_word_is_refused_with_its_flag(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of_words(words)
    assert str(refused.value) == message


def test_a_table_of_any_name_is_read_in_the_same_way() -> None:
    table = {"colour": "blue", "off": True}
    given = Given([Kinds], flags={}, table=table, table_name="kinds", file=Path("a.toml"))
    assert given.read(Kinds) == Kinds(colour=Colour.BLUE, off=True)
    assert given.values["colour"] is Colour.BLUE
    with pytest.raises(ConfigError, match=r"^a\.toml: \[kinds\]\.off is 1, must be true or false"):
        Given([Kinds], flags={}, table={"off": 1}, table_name="kinds", file=Path("a.toml"))
    with pytest.raises(ConfigError, match=r"^a\.toml: \[kinds\]\.of: unknown key; did you mean"):
        Given([Kinds], flags={}, table={"of": 1}, table_name="kinds", file=Path("a.toml"))


def test_the_help_has_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        of_words("--help")
    text = " ".join(capsys.readouterr().out.split())
    for shown in ("a count (default: 3)", "a limit (default: none)", "100 % is 1 (default: 0.5)"):
        assert shown in text
    assert "a colour (default: any)" in text
    assert "a bound --wait-s" in text


def test_a_component_gets_its_fields_by_name() -> None:
    @dataclass(frozen=True, slots=True)
    class Component:
        count: int
        share: float
        other: str = "own"

    kinds = Kinds(count=8)
    assert part(Component, kinds) == Component(8, 0.5)
    assert part(Component, kinds, share=0.25, other="given") == Component(8, 0.25, "given")
    with pytest.raises(TypeError, match="count"):
        part(Component, share=0.25)


@pytest.mark.parametrize(
    "section", ALL, ids=lambda section: f"{section.__module__}.{section.__name__}"
)
def test_every_default_is_in_its_own_range(section: type) -> None:
    assert settings_of(section)
    for setting in settings_of(section):
        if isinstance(setting.default, int | float):
            assert setting.check(setting.default) == setting.default, setting.name
