"""Where traces go, and which."""

from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.live.security.credentials import Secret


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How traces are exported.

    Attributes:
        scheme: "http" or "https".
        host: The collector's name or address.
        port: Its port.
        path: In origin form.
        share: Of the requests without a parent, which are traced.
        headers: Sent with every export; their values may be keys.
        timeout_s: For one export.
        gzip: Whether exports are compressed.
        ca_file: Certificates to trust; None for the system's.
        resource: What the proxy says of itself, by name.
    """

    scheme: str
    host: str
    port: int
    path: str
    share: float
    headers: tuple[tuple[str, Secret], ...]
    timeout_s: float
    gzip: bool
    ca_file: Path | None
    resource: tuple[tuple[str, str], ...]
