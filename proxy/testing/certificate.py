"""A certificate for loopback, made on the spot."""

import subprocess
from pathlib import Path

_KEYS = {"p256": "ec -pkeyopt ec_paramgen_curve:P-256", "ed25519": "ed25519"}


def make_certificate(folder: Path, *, kind: str = "p256") -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and localhost, and its key, made with openssl.

    Args:
        folder: Where to write them.
        kind: Of the key: `p256`, which every client takes, or `ed25519`, whose certificates and signatures
            have one length, so that a run in virtual time can be repeated exactly.
    """
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = (
        f"openssl req -x509 -newkey {_KEYS[kind]} -nodes -days 2 -set_serial 1 -subj /CN=localhost"
    )
    words += f" -addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(  # noqa: S603 - openssl, with words of ours.
        words.split(), check=True, capture_output=True
    )
    key.chmod(0o600)
    return cert, key
