"""What a wheel holds: the product, and none of the tests."""

import importlib
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
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


# How it is built and published: versions, image, workflows.

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXTRAS = PAGE["project"]["optional-dependencies"]
ACTIONLINT = shutil.which("actionlint")


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_each_version_is_fixed_for_tests_and_nothing_says_from_where() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert all(re.match(r"[a-z0-9._-]+==[0-9][^ ]*( ; .*)?$", line) for line in lines)
    fixed = {name_of(line) for line in lines}
    needed = [*PAGE["project"]["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"]]
    # setuptools builds the package, in an environment that constraints do not reach.
    assert {name_of(one) for one in needed} - fixed <= {"balanceroute", "setuptools"}


def test_the_image_has_extras_that_there_are_and_the_traces() -> None:
    deploy = ROOT / "topologies" / "deploy"
    built = (deploy / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", built, re.MULTILINE)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert "--constraint /source/constraints.txt" in built
    assert re.search(r"^USER [1-9]", built, re.MULTILINE)
    left_out = (deploy / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert not [one for one in left_out if one.startswith("traces")]


def test_the_workflows_run_what_there_is() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "release"]
    targets = re.findall(
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"make ([a-z-]+)", text)) <= set(targets)
        # No job may do more than it says.
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        for job in yaml.safe_load(text)["jobs"].values():
            for step in job.get("steps", ()):
                assert re.fullmatch(r"[\w/.-]+@[\w/.]+", step.get("uses", "a@b"))


@pytest.mark.skipif(ACTIONLINT is None, reason="no actionlint here")
def test_the_workflows_are_well_formed() -> None:
    assert ACTIONLINT is not None
    checked = subprocess.run(
        [ACTIONLINT, "-shellcheck=", *map(str, WORKFLOWS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
