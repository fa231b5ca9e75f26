"""What a wheel holds: the product, and none of the instruments that only tests and scripts use."""

import importlib
import re
import tomllib

from tests.script import ROOT

PAGE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PAGE["tool"]["setuptools"]["packages"]["find"]


def packages(exclude: list[str]) -> set[str]:
    """Return the packages that setuptools takes; it needs no network for that, as a build does."""
    assert SETTINGS["namespaces"] is False
    find_packages = importlib.import_module("setuptools").find_packages
    (where,) = SETTINGS["where"]
    return set(find_packages(str(ROOT / where), exclude, SETTINGS["include"]))


def test_the_wheel_has_all_packages_but_the_instruments() -> None:
    everything, shipped = packages([]), packages(SETTINGS["exclude"])
    instruments = {name for name in everything if name.startswith("balanceroute.proxy.testing")}
    assert "balanceroute.proxy.testing.chaos" in instruments
    assert "balanceroute.proxy.live.request" in shipped
    assert shipped == everything - instruments


def test_no_hint_installs_from_an_index_what_is_not_published() -> None:
    """Whoever owns our name there would be installed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for name in ("proxy", "predictors", "topologies", "traces", "engine_patch"):
        pages += (ROOT / name).rglob("*.py")
    hints = re.compile(r"""pip install ['"]?balanceroute""")
    assert not [page for page in pages if hints.search(page.read_text(encoding="utf-8"))]
