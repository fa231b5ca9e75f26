"""A certificate for loopback and its key, and further ones made on the spot."""

import shutil
import subprocess
from pathlib import Path
from unittest import SkipTest

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

_KEYS = {"p256": "ec -pkeyopt ec_paramgen_curve:P-256", "ed25519": "ed25519"}


def make_certificate(folder: Path, *, kind: str = "p256") -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and localhost, and its key, made with openssl.

    Args:
        folder: Where to write them.
        kind: Of the key: `p256`, which every client takes, or `ed25519`, whose certificates and signatures
            have one length, so that a run in virtual time can be repeated exactly.

    Raises:
        SkipTest: There is no openssl.
    """
    if shutil.which("openssl") is None:
        raise SkipTest("there is no openssl command to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = (
        f"openssl req -x509 -newkey {_KEYS[kind]} -nodes -days 2 -set_serial 1 -subj /CN=localhost"
    )
    words += f" -addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(words.split(), check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key
