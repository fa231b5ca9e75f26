"""One setting and how it is read, from the command line and from a topology file alike.

An `Option` is a flag and a key of the file's `[proxy]` table at once: its name, its default, its
range. `Values` looks each one up: flag before file before default.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.topologies import did_you_mean

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Option(Generic[T_co]):
    """One setting.

    Attributes:
        name: With underscores, as in the file.
        default: What it is if nobody says.
        check: Turns a value, as TOML or the command line gives it, into the setting. Raises
            ConfigError with a reason that reads on from the name ("is 0, must be ..").
        parse: Turns a word of the command line into a value for `check`; leaves what it cannot
            turn to `check`.
        help: For the command line, without the default.
        shown_default: The default in words; "" to leave it out.
        metavar: What stands for the value in the help; None for a switch.
        choices: The words allowed, if they can be listed.
        many: Whether the setting is a list.
        is_path: Whether a relative value in a file starts at the file's folder.
        not_paths: Values of a path setting that are words.
        at_top: Whether a file has it at its top, not in its `[proxy]` table.
    """

    name: str
    default: T_co
    check: Callable[[object], T_co]
    parse: Callable[[str], object]
    help: str
    shown_default: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    is_path: bool = False
    not_paths: tuple[str, ...] = ()
    at_top: bool = False

    @property
    def flag(self) -> str:
        """The flag, as in `--pool-limit`."""
        return f"--{self.name.replace('_', '-')}"


class Values:
    """Settings from flags, a file and defaults, in this order.

    Every value given is checked at once, also one that nothing asks for.

    Args:
        options: Every setting there is.
        flags: Values by name; None for a flag that was not given.
        top: Values at the top of the file, likewise.
        table: The file's `[proxy]` table.
        file: The file, for messages and relative paths.

    Raises:
        ConfigError: A name is unknown, or a value is not allowed. The message begins with the flag
            or the file and key.
    """

    def __init__(
        self,
        options: Iterable[Option[object]],
        *,
        flags: Mapping[str, object],
        top: Mapping[str, object] = MappingProxyType({}),
        table: Mapping[str, object] = MappingProxyType({}),
        file: Path = Path(),
    ) -> None:
        self._file = file
        self._flags = {name: value for name, value in flags.items() if value is not None}
        self._filed = {
            name: value for name, value in (*top.items(), *table.items()) if value is not None
        }
        known = {option.name: option for option in options}
        for name in self._flags:
            if name not in known:
                raise ConfigError(f"unknown flag {name!r}{did_you_mean(name, known)}")
        for name in table:
            place = f"{file}: [proxy].{name}"
            if name not in known:
                raise ConfigError(f"{place}: unknown key{did_you_mean(name, known)}")
            if known[name].at_top:
                raise ConfigError(f"{place}: belongs at the top of the file")
        for option in known.values():
            self.get(option)

    def get(self, option: Option[T]) -> T:
        """Return a setting."""
        if option.name in self._flags:
            value = self._flags[option.name]
        elif option.name in self._filed:
            value = self._filed[option.name]
            if option.is_path:
                value = self._from_folder(value, option.not_paths)
        else:
            return option.default
        try:
            return option.check(value)
        except ConfigError as error:
            raise ConfigError(f"{self.where(option)} {error}") from None

    def _from_folder(self, value: object, words: tuple[str, ...]) -> object:
        """Return a file's value with its relative paths starting at the file's folder."""
        if isinstance(value, list | tuple):
            return [self._from_folder(item, words) for item in value]
        if isinstance(value, str) and value and value not in words:
            return str(self._file.parent / value)
        return value

    def where(self, option: Option[object]) -> str:
        """Return what to call the setting: the flag, or the file and key if that is where it is."""
        if option.name in self._flags or option.name not in self._filed:
            return option.flag
        return f"{self._file}: {option.name if option.at_top else f'[proxy].{option.name}'}"


def integer(
    name: str, default: int, text: str, *, least: int, most: int, metavar: str = "N"
) -> Option[int]:
    """Return a setting that is an integer from `least` to `most`."""

    def check(value: object) -> int:
        return _integer(value, least, most)

    return Option(name, default, check, _parse_integer, text, f"{default}", metavar)


def optional_integer(
    name: str,
    default: str,
    text: str,
    *,
    word: str,
    least: int,
    most: int,
    metavar: str = "N",
) -> Option[int | None]:
    """Return a setting that is an integer, or None by default or if `word` is given.

    Args:
        name: Its name.
        default: What None comes to, in words.
        text: The help.
        word: How to ask for None.
        least: The smallest value.
        most: The largest value.
        metavar: What stands for it in the help.
    """

    def check(value: object) -> int | None:
        return None if value == word else _integer(value, least, most, word)

    return Option(name, None, check, _parse_integer, text, default, metavar)


def number(
    name: str, default: float, text: str, *, least: float, most: float, metavar: str = "X"
) -> Option[float]:
    """Return a setting that is a number from `least` to `most`."""

    def check(value: object) -> float:
        return _number(value, least, most)

    return Option(name, default, check, _parse_number, text, f"{default:g}", metavar)


def optional_number(
    name: str,
    default: str,
    text: str,
    *,
    least: float,
    most: float,
    word: str = "auto",
    metavar: str = "X",
) -> Option[float | None]:
    """Return a setting that is a number, or None by default or if `word` is given."""

    def check(value: object) -> float | None:
        return None if value == word else _number(value, least, most, word)

    return Option(name, None, check, _parse_number, text, default, metavar)


def seconds(
    name: str, default: float, text: str, *, least: float = 0.001, most: float = 1e6
) -> Option[float]:
    """Return a setting that is a time in seconds."""
    return number(name, default, text, least=least, most=most, metavar="S")


def choice(
    name: str,
    default: str,
    text: str,
    choices: Iterable[str],
    *,
    shown_default: str = "",
    at_top: bool = False,
) -> Option[str]:
    """Return a setting that is one of some words."""
    words = tuple(choices)

    def check(value: object) -> str:
        if value not in words:
            raise ConfigError(f"is {shown(value)}, must be one of {', '.join(words)}")
        return str(value)

    return Option(
        name,
        default,
        check,
        str,
        text,
        shown_default or default,
        "NAME",
        choices=words,
        at_top=at_top,
    )


def text(
    name: str, default: str, help_: str, *, check: Callable[[str], str], metavar: str
) -> Option[str]:
    """Return a setting that is a text which `check` accepts."""

    def checked(value: object) -> str:
        return check(_text(value))

    return Option(name, default, checked, str, help_, default, metavar)


def texts(
    name: str,
    help_: str,
    *,
    check: Callable[[str], T],
    metavar: str,
    shown_default: str = "",
    at_top: bool = True,
) -> Option[tuple[T, ...]]:
    """Return a setting that is a list of texts, each of which `check` turns into an item."""

    def checked(value: object) -> tuple[T, ...]:
        return tuple(check(item) for item in _texts(value))

    return Option(name, (), checked, str, help_, shown_default, metavar, many=True, at_top=at_top)


def file(name: str, help_: str) -> Option[Path | None]:
    """Return a setting that names a file."""

    def check(value: object) -> Path | None:
        return Path(_text(value))

    return Option(name, None, check, str, help_, "", "FILE", is_path=True)


def file_or_word(name: str, default: str, help_: str, words: tuple[str, ...]) -> Option[str]:
    """Return a setting that names a file or is one of some words."""
    return Option(name, default, _text, str, help_, default, "FILE", is_path=True, not_paths=words)


def files_or_words(name: str, help_: str, words: tuple[str, ...]) -> Option[tuple[str, ...]]:
    """Return a setting that is a list of files, or some of some words among them."""

    def check(value: object) -> tuple[str, ...]:
        return tuple(map(_text, _texts(value)))

    return Option(name, (), check, str, help_, "", "FILE", many=True, is_path=True, not_paths=words)


def switch(name: str, *, default: bool, text: str) -> Option[bool]:
    """Return a setting that is on or off: `--name` or `--no-name`."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"is {shown(value)}, must be true or false")
        return value

    return Option(name, default, check, str, text, "on" if default else "off")


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


def _integer(value: object, least: int, most: int, word: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}, must be an integer{_or(word)}")
    if not least <= value <= most:
        raise ConfigError(f"is {shown(value)}, must be {_range(least, most)}{_or(word)}")
    return value


def _number(value: object, least: float, most: float, word: str = "") -> float:
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
