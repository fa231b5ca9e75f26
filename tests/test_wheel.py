"""What a wheel holds: the product, and none of the tests."""

import importlib
import re
import tomllib

from tests.script import ROOT

PAGE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PAGE["tool"]["setuptools"]["packages"]["find"]


def test_the_wheel_has_the_packages_and_no_tests() -> None:
    """What setuptools takes; it needs no network for that, as a build does."""
    assert SETTINGS["namespaces"] is False
    find_packages = importlib.import_module("setuptools").find_packages
    (where,) = SETTINGS["where"]
    shipped = set(find_packages(str(ROOT / where), include=SETTINGS["include"]))
    assert "balanceroute.proxy.live.request" in shipped
    assert {name.split(".")[0] for name in shipped} == {"balanceroute"}


def test_no_hint_installs_from_an_index_what_is_not_published() -> None:
    """Whoever owns our name there would be installed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for name in ("proxy", "predictors", "topologies", "traces", "engine_patch"):
        pages += (ROOT / name).rglob("*.py")
    hints = re.compile(r"""pip install ['"]?balanceroute""")
    assert not [page for page in pages if hints.search(page.read_text(encoding="utf-8"))]
