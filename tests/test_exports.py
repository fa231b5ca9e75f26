"""The public names of each sub-package: adding or losing one is a decision, not an accident."""

import importlib

import pytest

PUBLIC = {
    "balanceroute.traces": [
        "FORMATS",
        "TraceError",
        "TraceRequest",
        "detect_format",
        "read_trace",
        "write_native",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_its_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert all(hasattr(module, name) for name in PUBLIC[package])
