"""How a setting is declared: as a field of a frozen dataclass, its section.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class LogSettings:
        load_log_interval_s: float = seconds(0.1, "between two samples", least=0.01)

The field is a flag (`--load-log-interval-s`) and a key of a file at once. A declaration has the
default first, then the help without the default, then the range.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from balanceroute.proxy.core.errors import ConfigError, shown

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str = ""  # With underscores, as in a file.
    # What the section calls it, which is its name unless the declaration has another one.
    attribute: str = ""
    default: object  # The value where none is given.
    # Turns a value, as TOML or the command line gives it, into the setting. Raises ConfigError with
    # a reason that reads on from the name ("is 0, must be ..").
    check: Callable[[object], object]
    # Turns a word of the command line into a value for `check`; leaves what it cannot turn to
    # `check`.
    parse: Callable[[str], object] = str
    help: str  # For the command line, without the default.
    shown_default: str  # The default in words; "" to leave it out.
    # What stands for the value in the help; None for choices and switches.
    metavar: str | None = None
    # "switch" for a flag and its `--no-` form, "store_true" for a flag alone; None if it takes a
    # value.
    action: str | None = None
    choices: tuple[str, ...] = ()  # The words allowed, if they can be listed.
    aliases: tuple[str, ...] = ()  # Other flags for it: what other routers and engines call it.
    many: bool = False  # Whether the setting is a list.
    is_path: bool = False  # Whether a relative value in a file starts at the file's folder.
    not_paths: tuple[str, ...] = ()  # Values of a path setting that are words.
    at_top: bool = False  # Whether a file has it at its top, not in a table.
    # The least and the largest number; None for what has no such bounds.
    bounds: tuple[float, float] | None = None
    kind: str = "string"  # In JSON: "string", "integer", "number", "boolean", "array" or "object".
    words: tuple[str, ...] = ()  # What may stand there beside a number.

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_DECLARED: dict[type, tuple[Setting, ...]] = {}


def settings_of(section: type) -> tuple[Setting, ...]:
    if section not in _DECLARED:  # A proxy asks some sixty times as it starts.
        _DECLARED[section] = tuple(
            replace(setting, name=setting.name or one.name, attribute=one.name)
            for one in fields(section)
            if (setting := cast("Setting | None", one.metadata.get(_KEY))) is not None
        )
    return _DECLARED[section]


def check_ranges(section: object) -> None:
    """Check what a section has, which need not come from a flag or a file; None is in every range.

    Raises:
        ConfigError: A number is out of its range. The message begins with the attribute.
    """
    for one in settings_of(type(section)):
        value = getattr(section, one.attribute)
        many = isinstance(value, tuple)
        for item in value if many else (value,):
            # Not a number is in no range.
            if not (one.bounds is None or item is None or one.bounds[0] <= item <= one.bounds[1]):
                verb = "has" if many else "is"
                raise ConfigError(f"{one.attribute} {verb} {item}, must be {_range(*one.bounds)}")


def part(component: Callable[..., T], *sections: object, **overrides: object) -> T:
    """Return a component's settings: each of its fields that a section has, by its name.

    Args:
        overrides: Fields that no section has, or other values of theirs.
    """
    wanted = {one.name for one in fields(component)}  # type: ignore[arg-type]
    found = {
        one.name: getattr(section, one.name)
        for section in sections
        for one in fields(section)  # type: ignore[arg-type]
        if one.name in wanted
    }
    return component(**found | overrides)


# Kinds of settings. To a type checker each returns its default, as `field` does.


def integer(
    default: T,
    text: str,
    least: int,
    most: int,
    *,
    word: str = "",
    off: str = "",
    shown_default: str = "",
    metavar: str = "N",
    name: str = "",
) -> T | int:
    """Declare an integer from `least` to `most`, or None if that is the default.

    Args:
        word: The word for None; "" if None cannot be given.
        off: The word for 0, which is below `least` then; "" if there is none.
        shown_default: What None comes to, in words; the word itself if "".
        name: The setting's name, if it is not the attribute's.
    """
    some = partial(_integer, least=least, most=most, word=f"{word}' or '{off}" if off else word)
    check = _or_word(lambda value: 0 if off and value == off else some(value), word)
    shown_default = shown_default or word if default is None else f"{default}"
    bounds = (0 if off else least, most)
    traits = {"bounds": bounds, "kind": "integer", "words": tuple(filter(None, (word, off)))}
    return _declare(
        default, text, check, shown_default, metavar, parse=_parse_integer, name=name, **traits
    )


def number(
    default: T,
    text: str,
    least: float,
    most: float,
    *,
    word: str = "",
    shown_default: str = "",
    metavar: str = "X",
    name: str = "",
) -> T | float:
    """Declare a number; see `integer`."""
    check = _or_word(partial(_number, least=least, most=most, word=word), word)
    shown_default = shown_default or word if default is None else f"{default:g}"
    traits = {
        "bounds": (least, most),
        "kind": "number",
        "words": (word,) * bool(word),
        "name": name,
    }
    return _declare(default, text, check, shown_default, metavar, parse=_parse_number, **traits)


def seconds(default: float, text: str, least: float = 0.001, most: float = 1e6) -> float:
    return number(default, text, least, most, metavar="S")


def choice(
    default: T,
    text: str,
    values: Mapping[str, T],
    *,
    shown_default: str = "",
    at_top: bool = False,
    name: str = "",
    aliases: tuple[str, ...] = (),
    also: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Declare one of some values, each with its word; `also` has other words, each for one of these."""

    def parse(value: object) -> object:
        return also.get(value, value) if isinstance(value, str) else value

    def check(value: object) -> T:
        value = parse(value)
        if not isinstance(value, str) or value not in values:
            raise ConfigError(f"is {shown(value)}, must be one of {', '.join(values)}")
        return values[value]

    shown_default = shown_default or next((word for word in values if values[word] == default), "")
    traits = {"choices": tuple(values), "at_top": at_top, "name": name}
    traits |= {"aliases": aliases, "parse": parse}
    return _declare(default, text, check, shown_default, None, **traits)


def words(names: Iterable[str]) -> dict[str, str]:
    """Return words that stand for themselves, for `choice`."""
    return {name: name for name in names}


def named(values: type[E]) -> dict[str, E]:
    """Return the members of an enumeration by their values, for `choice`."""
    return {str(one.value): one for one in values}


def text(
    default: T,
    text: str,
    check: Callable[[str], str] = str,
    *,
    metavar: str,
    at_top: bool = False,
    aliases: tuple[str, ...] = (),
) -> T | str:
    """Declare a text which `check` accepts; its default may be None."""
    shown_default = "" if default is None else f"{default}"

    def checked(value: object) -> str:
        return check(_text(value))

    traits = {"at_top": at_top, "aliases": aliases}
    return _declare(default, text, checked, shown_default, metavar, **traits)


def texts(
    text: str,
    check: Callable[[str], T],
    *,
    metavar: str,
    shown_default: str = "",
    at_top: bool = True,
    aliases: tuple[str, ...] = (),
) -> tuple[T, ...]:
    """Declare a list of texts, each of which `check` turns into an item."""

    def checked(value: object) -> tuple[T, ...]:
        return tuple(map(check, _texts(value)))

    nothing: tuple[T, ...] = ()
    traits = {"many": True, "at_top": at_top, "aliases": aliases}
    return _declare(nothing, text, checked, shown_default, metavar, **traits)


def integers(text: str, least: int, most: int, *, metavar: str) -> tuple[int, ...]:
    """Declare a list of integers: with commas on the command line, an array in a file."""
    check = partial(_integer, least=least, most=most)
    nothing: tuple[int, ...] = ()
    traits: dict[str, Any] = {"kind": "array", "bounds": (least, most)}
    return _declare(nothing, text, _all_of(check, _parse_integer), "", metavar, **traits)


def numbers(text: str, least: float, most: float, *, metavar: str) -> tuple[float, ...]:
    """Declare a list of numbers; see `integers`."""
    check = partial(_number, least=least, most=most)
    nothing: tuple[float, ...] = ()
    traits: dict[str, Any] = {"kind": "array", "bounds": (least, most)}
    return _declare(nothing, text, _all_of(check, _parse_number), "", metavar, **traits)


def weights(default: tuple[float, ...], text: str, *, metavar: str) -> tuple[float, ...]:
    """Declare as many shares as the default has, which add up to 1 or less; see `integers`."""
    shares = _all_of(partial(_number, least=0, most=1), _parse_number)

    def checked(value: object) -> tuple[float, ...]:
        found = shares(value)
        # Tenths are rounded.
        if len(found) != len(default) or not 0 < sum(found) < 1 + 1e-9:
            reason = f"must be {len(default)} numbers with a sum above 0 and up to 1"
            raise ConfigError(f"is {shown(value)}, {reason}")
        return found

    shown_default = ",".join(f"{one:g}" for one in default)
    return _declare(default, text, checked, shown_default, metavar, kind="array")


def table(text: str, check: Callable[[str, object], T]) -> tuple[tuple[str, T], ...]:
    """Declare a table of a file; `check` returns what a key has, given its value."""

    def checked(value: object) -> tuple[tuple[str, T], ...]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"is {shown(value)}, must be a table")
        return tuple((key, check(key, one)) for key, one in value.items())

    nothing: tuple[tuple[str, T], ...] = ()
    return _declare(nothing, text, checked, "", "TABLE", kind="object")


def file(text: str, *, metavar: str = "FILE") -> Path | None:
    return _declare(None, text, lambda value: Path(_text(value)), "", metavar, is_path=True)


def file_or_word(default: str, text: str, words: tuple[str, ...]) -> str:
    return _declare(default, text, _text, default, "FILE", is_path=True, not_paths=words)


def files_or_words(text: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Declare a list of files, or some of some words among them."""
    nothing: tuple[str, ...] = ()
    traits = {"many": True, "is_path": True, "not_paths": words}
    return _declare(
        nothing, text, lambda value: tuple(map(_text, _texts(value))), "", "FILE", **traits
    )


def switch(default: bool, text: str) -> bool:
    """Declare what is on or off: `--name` or `--no-name`."""
    shown_default = "on" if default else "off"
    return _declare(default, text, _boolean, shown_default, None, action="switch", kind="boolean")


def flag(text: str) -> bool:
    """Declare what is off unless its flag is given: `--name`."""
    return _declare(False, text, _boolean, "", None, action="store_true", kind="boolean")


def _declare(
    default: T,
    text: str,
    check: Callable[[object], object],
    shown_default: str,
    metavar: str | None,
    **traits: Any,
) -> T:
    setting = Setting(
        default=default,
        check=check,
        help=text,
        shown_default=shown_default,
        metavar=metavar,
        **traits,
    )
    return field(default=default, metadata={_KEY: setting})


def _or_word(check: Callable[[object], T], word: str) -> Callable[[object], T | None]:
    return lambda value: None if word and value == word else check(value)


def _all_of(
    check: Callable[[object], T], parse: Callable[[str], object]
) -> Callable[[object], tuple[T, ...]]:
    def checked(value: object) -> tuple[T, ...]:
        items = list(map(parse, value.split(","))) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"is {shown(value)}, must be a list of numbers")
        return tuple(map(check, items))

    return checked


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}, must be true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"is {shown(value)}, must be a text")
    return value


def _texts(value: object) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ConfigError(f"is {shown(value)}, must be a list of texts")
    for item in items:
        if not isinstance(item, str):
            raise ConfigError(f"has {shown(item)}, must be a list of texts")
    return list(items)


def _integer(value: object, *, least: int, most: int, word: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}, must be an integer{_or(word)}")
    if not least <= value <= most:
        raise ConfigError(f"is {shown(value)}, must be {_range(least, most)}{_or(word)}")
    return value


def _number(value: object, *, least: float, most: float, word: str = "") -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}, must be a number{_or(word)}")
    if not least <= value <= most:  # Not a number is in no range.
        raise ConfigError(f"is {shown(value)}, must be {_range(least, most)}{_or(word)}")
    return float(value)


def _range(least: float, most: float) -> str:
    bounds = (f"{end:g}" if float(f"{end:g}") == end else str(end) for end in (least, most))
    return "from {} to {}".format(*bounds)


def _or(word: str) -> str:
    return f", or {word!r}" if word else ""


def _parse_integer(word: str) -> object:
    try:
        return int(word)
    except ValueError:
        return word


def _parse_number(word: str) -> object:
    try:
        return float(word)
    except ValueError:
        return word
