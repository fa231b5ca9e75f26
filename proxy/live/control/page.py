"""The page of the admin listener: one file with its style and script, and nothing from elsewhere."""

import base64
import hashlib
from importlib.resources import files

from balanceroute.proxy.wire.messages import Headers

PAGE = files(__package__).joinpath("page.html").read_bytes()
"""The page, as UTF-8."""


def _hash(tag: bytes) -> str:
    inside = PAGE.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
    return base64.b64encode(hashlib.sha256(inside).digest()).decode()


# It runs no other script, asks nobody else, and no other page can frame it and steal clicks.
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_hash(b'script')}'; "
    f"style-src 'sha256-{_hash(b'style')}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
]
"""Of the answer."""
