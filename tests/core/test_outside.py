"""Parts from outside this package."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from balanceroute.proxy.core.config import is_outside, made, outside_name
from balanceroute.proxy.core.errors import ConfigError

MODULE = """
class Part:
    size = 3

def part(*arguments):
    return Part()

def fails():
    raise KeyError("no")

broken = 7
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with parts of both kinds."""
    (tmp_path / "outside_parts.py").write_text(MODULE)
    metadata = tmp_path / "parts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[balanceroute.policies]\nsmallest = outside_parts:part\n"
        "[balanceroute.predictors]\nguess = outside_parts:part\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("outside_parts", None)


def test_names_are_those_of_functions_and_of_entry_points() -> None:
    assert outside_name("policies", "outside_parts:part") == "outside_parts:part"
    assert outside_name("policies", "smallest") == "outside_parts:part"
    assert outside_name("predictors", "guess") == "outside_parts:part"
    assert outside_name("policies", "guess") is None
    assert outside_name("policies", "jsq") is None
    assert not is_outside("smallest")
    assert not is_outside("http://a:b")


def test_what_a_function_makes_is_checked() -> None:
    assert made("policy", "outside_parts:part", ("size",), 1, 2).size == 3
    for name, reason in (
        ("outside_parts:nothing", "policy 'outside_parts:nothing' cannot be imported: module"),
        ("no_such_module:part", "cannot be imported: No module named 'no_such_module'"),
        ("outside_parts:fails", "cannot be made: 'no'"),
        ("outside_parts:broken", "cannot be made: 'int' object is not callable"),
    ):
        with pytest.raises(ConfigError, match=reason):
            made("policy", name, ("size",))
    with pytest.raises(ConfigError, match=r"is none: <.*> has no height, width"):
        made("policy", "outside_parts:part", ("size", "height", "width"))
