"""A certificate and its key, and others made on the spot."""

import shutil
from pathlib import Path

import pytest

from balanceroute.proxy.testing import certificate as testing

# Made for tests: localhost, and a key that protects nothing.
CERT = """-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUCFIRJ44SDaYGjpB/f8pUXwMtR8AwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTA3MjQwNloYDzIxMjYxMDI4
MDcyNDA2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQODdpDWI+38XlLGSHTmNU8Lqa7nkQrj05LCg1ujpH3zwb/hWAnVc5e
e6PoIdbpOdmRtU/zC42vb34gicECzHQro28wbTAdBgNVHQ4EFgQUaWTh93Llh41j
3LLR04/sxbv5kvowHwYDVR0jBBgwFoAUaWTh93Llh41j3LLR04/sxbv5kvowDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhAJ5dtrAzKmMN+UsStvAGlDd47kAKUU9WRWa4m/ocTiLeAiEA
u6QAuW5JbTdUrAl25AcT9iVZZrlzV8K1Qks+ZBGg80k=
-----END CERTIFICATE-----
"""
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgZ2MNJUbWudxCr+1V
xn2eDYaVeif2ccmb7/7YTCiu/U6hRANCAAQODdpDWI+38XlLGSHTmNU8Lqa7nkQr
j05LCg1ujpH3zwb/hWAnVc5ee6PoIdbpOdmRtU/zC42vb34gicECzHQr
-----END PRIVATE KEY-----
"""


def make_certificate(folder: Path, *, kind: str = "p256") -> tuple[Path, Path]:
    """Make a self-signed certificate for loopback, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    return testing.make_certificate(folder, kind=kind)
