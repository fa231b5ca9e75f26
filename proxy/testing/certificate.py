"""A certificate for loopback, made on the spot."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate and its key, made with openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    words += f" -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(  # noqa: S603 - openssl, with words of ours.
        words.split(), check=True, capture_output=True
    )
    key.chmod(0o600)
    return cert, key
