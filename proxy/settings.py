"""Settings as they are given: the flag before the environment's variable before the file before the default.

The variable of a setting is `BALANCEROUTE_` and its name in capitals. A list has its items apart by white space, a
switch is `true` or `false`, and an empty variable counts as one that is not there.
"""

import argparse
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import Setting, flag_of, settings_of
from balanceroute.topologies import did_you_mean

T = TypeVar("T")
_PREFIX = "BALANCEROUTE_"
# Those that are no settings: of the engines' key, of a hand-over, and of engines that are measured.
_RESERVED = ("TOPOLOGY", "ENGINE_KEY", "HAND_OVER", "STEP_TRACE", "CPU_SHIM", "VLLM_PYTHON")
# What Kubernetes gives each pod of a namespace with a Service called balanceroute or balanceroute-*.
_OF_SERVICES = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP)(_.+)?)")
_OF_A_SERVICE = re.compile(r"(tcp|udp)://")
_SWITCH = {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False}


def variable_of(name: str) -> str:
    """Return the environment's variable of a setting."""
    return f"{_PREFIX}{name.upper()}"


def _variables(known: Mapping[str, Setting], environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of the environment, by their names.

    Raises:
        ConfigError: A variable with the prefix is of nothing that is known.
    """
    found: dict[str, object] = {}
    names = {variable_of(name): name for name in known}
    reserved = {f"{_PREFIX}{word}" for word in _RESERVED}
    for variable, word in environment.items():
        if not variable.startswith(_PREFIX) or not word.strip() or variable in reserved:
            continue
        rest = variable.removeprefix(_PREFIX)
        if _OF_SERVICES.fullmatch(rest) or (rest.endswith("PORT") and _OF_A_SERVICE.match(word)):
            continue
        if variable not in names:
            hint = did_you_mean(variable, (*names, *reserved))
            raise ConfigError(f"{variable}: no setting has this variable{hint}")
        setting = known[names[variable]]
        if setting.action is not None:
            found[setting.name] = _SWITCH.get(word.strip().lower(), word)
        else:
            found[setting.name] = word.split() if setting.many else setting.parse(word)
    return found


class Given:
    """The given values of some sections. It checks every value at once, also one that no part uses.

    Args:
        sections: All that can be given.
        flags: Values by name; None for a flag that was not given.
        environment: Whose variables stand for flags that were not given.
        top: Values at the top of the file, likewise.
        table: A table of the file.
        table_name: Its name.
        wider: The table `proxy`, whose values `table` goes before.
        file: The file, for messages and relative paths.

    Attributes:
        flags: The values of the flags that were given, as they were.
        values: Of all settings, checked.

    Raises:
        ConfigError: A name is unknown, or a value is not allowed. The message begins with the flag
            or the file and key.
    """

    def __init__(
        self,
        sections: Iterable[type],
        *,
        flags: Mapping[str, object],
        environment: Mapping[str, str] = MappingProxyType({}),
        top: Mapping[str, object] = MappingProxyType({}),
        table: Mapping[str, object] = MappingProxyType({}),
        table_name: str = "proxy",
        wider: Mapping[str, object] = MappingProxyType({}),
        file: Path = Path(),
    ) -> None:
        self._file = file
        tables = (("proxy", wider), (table_name, table))
        self._tables = {name: place for place, content in tables for name in content}
        self.flags = {name: value for name, value in flags.items() if value is not None}
        self._filed = {
            name: value
            for name, value in (*top.items(), *wider.items(), *table.items())
            if value is not None
        }
        self._known = {one.name: one for section in sections for one in settings_of(section)}
        self._variables = _variables(self._known, environment)
        for name in self.flags:
            if name not in self._known:
                raise ConfigError(f"unknown flag {name!r}{did_you_mean(name, self._known)}")
        for name, where in self._tables.items():
            place = f"{file}: [{where}].{name}"
            if name not in self._known:
                raise ConfigError(f"{place}: unknown key{did_you_mean(name, self._known)}")
            if self._known[name].at_top:
                raise ConfigError(f"{place}: belongs at the top of the file")
        self.values = {one.name: self._value(one) for one in self._known.values()}

    def read(self, section: type[T], **extra: object) -> T:
        """Return a section, with fields that are no settings."""
        values = {one.attribute: self.values[one.name] for one in settings_of(section)}
        return section(**values | extra)

    @property
    def places(self) -> dict[str, str]:
        """The settings that were given and are not off, with their names for messages; see `where`."""
        names = dict.fromkeys([*self.flags, *self._variables, *self._filed])
        off = (None, False)
        return {
            name: self.where(name)
            for name in names
            if not any(self.values[name] is one for one in off)
        }

    def where(self, name: str) -> str:
        """Return a setting's name for messages: the flag, or the variable, or the file and key that gives it."""
        if name in self._variables and name not in self.flags:
            return variable_of(name)
        if name in self.flags or name not in self._filed:
            return flag_of(name)
        key = name if self._known[name].at_top else f"[{self._tables[name]}].{name}"
        return f"{self._file}: {key}"

    @contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Put the name of a setting before the fault of its value."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.where(name)} {error}") from None

    def _value(self, setting: Setting) -> object:
        if setting.name in self.flags:
            value = self.flags[setting.name]
        elif setting.name in self._variables:
            value = self._variables[setting.name]
        elif setting.name in self._filed:
            value = self._filed[setting.name]
            if setting.is_path:
                value = self._from_folder(value, setting.not_paths)
        else:
            return setting.default
        with self.blamed(setting.name):
            return setting.check(value)

    def _from_folder(self, value: object, words: tuple[str, ...]) -> object:
        """Return a file's value with its relative paths starting at the file's folder."""
        if isinstance(value, list | tuple):
            return [self._from_folder(item, words) for item in value]
        if isinstance(value, str) and value and value not in words:
            return str(self._file.parent / value)
        return value


def add_flags(
    group: "argparse._ActionsContainer", *sections: type, without: Collection[str] = ()
) -> None:
    """Add the flags of the settings of sections, but of those named.

    A flag that is not given stays None, so that what a file says can stand in for it. Values are
    checked with those of the file, not while the command line is parsed.
    """
    for setting in chain.from_iterable(map(settings_of, sections)):
        if setting.name not in without:
            _add_flag(group, setting)


def read_flags(arguments: argparse.Namespace, *sections: type) -> Given:
    """Return the given values of sections that no file can give.

    Raises:
        ConfigError: A value is not allowed.
    """
    return Given(sections, flags=given_by_flags(arguments, sections))


def given_by_flags(arguments: argparse.Namespace, sections: Iterable[type]) -> dict[str, object]:
    """Return the values of the settings' flags by name; None for those that were not given."""
    names = [one.name for section in sections for one in settings_of(section)]
    return {name: getattr(arguments, name, None) for name in names}


def _add_flag(group: "argparse._ActionsContainer", setting: Setting) -> None:
    default = f" (default: {setting.shown_default})" if setting.shown_default else ""
    text = f"{setting.help}{default}".replace("%", "%%")
    names = (setting.flag, *setting.aliases)
    if setting.action is not None:
        switch = setting.action == "switch"
        action = argparse.BooleanOptionalAction if switch else setting.action
        group.add_argument(*names, action=action, default=None, help=text)
    elif setting.many:
        group.add_argument(*names, nargs="+", action="extend", metavar=setting.metavar, help=text)
    else:
        group.add_argument(
            *names,
            type=setting.parse,
            choices=setting.choices or None,
            metavar=setting.metavar,
            help=text,
        )
