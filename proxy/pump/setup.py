"""Builds the wheel of the native library with cargo: a folder with one file, for any Python on such a machine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_PACKAGE, _FILE = "balanceroute_native", "libbalanceroute_native.so"
_CRATE = Path(__file__).resolve().parent


def _built() -> Path:
    if sys.platform != "linux":
        sys.exit("balanceroute-native is for Linux; elsewhere balanceroute does the same in Python")
    cargo = shutil.which("cargo") or shutil.which("cargo", path=str(Path.home() / ".cargo" / "bin"))
    if cargo is None:
        sys.exit(
            "balanceroute-native is built with cargo, which is not on the path: see https://rustup.rs"
        )
    target = Path(os.environ.get("CARGO_TARGET_DIR") or _CRATE / "target")
    command = [cargo, "build", "--release", "--locked", "--target-dir", str(target)]
    subprocess.run(command, cwd=_CRATE, check=True)  # noqa: S603 - the crate's own build.
    return target / "release" / _FILE


class _Build(build_py):
    def run(self) -> None:
        folder = Path(self.build_lib) / _PACKAGE
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_built(), folder / _FILE)


class _Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Name the oldest C library that it runs with."""
        library = next(Path(self.bdist_dir).rglob(_FILE)).read_bytes()
        needed = max(
            (int(one), int(two)) for one, two in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
        )
        machine = super().get_tag()[2].removeprefix("linux_")
        return "py3", "none", f"manylinux_{needed[0]}_{needed[1]}_{machine}"


class _Distribution(Distribution):
    def has_pure_modules(self) -> bool:
        """Have `_Build` run."""
        return True

    def has_ext_modules(self) -> bool:
        """Tell that it is for one machine."""
        return True


setup(
    packages=[],
    distclass=_Distribution,
    cmdclass={"build_py": _Build, "bdist_wheel": _Wheel},
)
