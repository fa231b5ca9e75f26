"""Where traces of requests go: flags, and the variables that OpenTelemetry's SDKs read.

Variables and their meanings: https://opentelemetry.io/docs/specs/otel/protocol/exporter/ and
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from balanceroute import __version__
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.setting import number, text
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.security import Secret, engine_context
from balanceroute.proxy.settings import Given

# Where traces go, and which.


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How traces are exported."""

    scheme: str  # "http" or "https".
    host: str  # The collector's name or address.
    port: int  # Its port.
    path: str  # In origin form.
    share: float  # Of the requests without a parent, which are traced.
    headers: tuple[tuple[str, Secret], ...]  # Sent with every export; their values may be keys.
    timeout_s: float  # For one export.
    gzip: bool  # Whether exports are compressed.
    ca_file: Path | None  # Certificates to trust; None for the system's.
    resource: tuple[tuple[str, str], ...]  # What the proxy says of itself, by name.


_TRACES_PATH = "/v1/traces"
_TIMEOUT_MS = "10000"
_URL = re.compile(r"(https?://[^/?#]+)(/[!-~]*)?", re.IGNORECASE)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE = re.compile(r"[ -~]{0,4096}")
# Both go to the same address, and receivers take either.
_PROTOCOLS = ("http/protobuf", "http/json")
_ALWAYS_ON, _RATIO = "parentbased_always_on", "parentbased_traceidratio"
_SAMPLERS = (_ALWAYS_ON, "parentbased_always_off", _RATIO)


def collector_url(word: str) -> str:
    """Check the address of a collector, which may have a path. Raises ConfigError."""
    _parts(word)
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Traces of requests, for an OpenTelemetry collector."""

    otlp_traces_endpoint: str | None = text(
        None,
        "where a collector takes traces of requests by OTLP over HTTP, as "
        "http://HOST:4318/v1/traces (default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or "
        "OTEL_EXPORTER_OTLP_ENDPOINT and /v1/traces; else there are no traces)",
        collector_url,
        metavar="URL",
    )
    trace_share: float | None = number(
        None,
        "share of the requests that are traced, of those whose client does not decide it by a "
        "traceparent header",
        0,
        1,
        word="auto",
        shown_default="1, or what OTEL_TRACES_SAMPLER says",
    )


def export_settings(given: Given, environment: Mapping[str, str]) -> ExportSettings | None:
    """Return where traces go; None if they are off. Raises ConfigError."""
    settings, variables = given.read(TracingSettings), _Variables(environment)
    place, share = settings.otlp_traces_endpoint or variables.endpoint(), settings.trace_share
    if place is None:
        if share is not None:
            reason = "means nothing without --otlp-traces-endpoint"
            raise ConfigError(f"{given.where('trace_share')}: {reason}")
        return None
    url, path = _parts(place)
    return ExportSettings(
        scheme=url.scheme,
        host=url.host,
        port=url.port,
        path=path or _TRACES_PATH,
        share=variables.share() if share is None else share,
        headers=variables.headers(),
        timeout_s=variables.timeout_s(),
        gzip=variables.of_traces("COMPRESSION", ("none", "gzip")) == "gzip",
        ca_file=variables.ca_file(),
        resource=tuple(variables.resource().items()),
    )


def _parts(word: str) -> tuple[EngineUrl, str]:
    """Return the server of a URL and its path, in origin form; the path is empty if none was given."""
    match = _URL.fullmatch(word)
    if match is None:
        raise ConfigError(f"is {shown(word)}, must be http:// or https://, a host and a path")
    url = EngineUrl.parse(match[1])
    if url.rank is not None:
        raise ConfigError(f"is {shown(word)}: a collector has no rank")
    return url, match[2] or ""


class _Variables:
    """OpenTelemetry's variables. An empty one is one that is not set."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values = {
            name: value.strip()
            for name, value in environment.items()
            if name.startswith("OTEL_") and value.strip()
        }

    def endpoint(self) -> str | None:
        """Return the URL for traces; None if there is none, or tracing is switched off."""
        off = self._values.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if off or self._word("OTEL_TRACES_EXPORTER", ("otlp", "none")) == "none":
            return None
        for kind, suffix in (("TRACES_ENDPOINT", ""), ("ENDPOINT", _TRACES_PATH)):
            name = f"OTEL_EXPORTER_OTLP_{kind}"
            if name in self._values:
                self.of_traces("PROTOCOL", _PROTOCOLS)
                value = self._values[name]
                try:
                    return collector_url(value.rstrip("/") + suffix if suffix else value)
                except ConfigError as error:
                    raise ConfigError(f"{name} {error}") from None
        return None

    def of_traces(self, what: str, words: tuple[str, ...]) -> str:
        """Return the setting of exports of traces, or else of all exports; by default the first word."""
        return self._word(self._name(what), words)

    def share(self) -> float:
        sampler = self._word("OTEL_TRACES_SAMPLER", _SAMPLERS)
        if sampler != _RATIO:
            return float(sampler == _ALWAYS_ON)
        return self._number("OTEL_TRACES_SAMPLER_ARG", "1", most=1.0)

    def timeout_s(self) -> float:
        return self._number(self._name("TIMEOUT"), _TIMEOUT_MS, least=1.0, most=1e9) / 1e3

    def headers(self) -> tuple[tuple[str, Secret], ...]:
        name = self._name("HEADERS")
        pairs = self._pairs(name)
        for key, value in pairs.items():
            if not (_TOKEN.fullmatch(key) and _VALUE.fullmatch(value)):
                raise ConfigError(f"{name}: {shown(key)} is no header, or has no value of one")
        return tuple((key, Secret(value.encode())) for key, value in pairs.items())

    def ca_file(self) -> Path | None:
        name = self._name("CERTIFICATE")
        if name not in self._values:
            return None
        path = Path(self._values[name])
        try:
            engine_context(path, insecure=False)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None
        return path

    def resource(self) -> dict[str, str]:
        found = {
            "service.name": "balanceroute",
            "service.version": __version__,
            "host.name": socket.gethostname(),
        }
        found |= self._pairs("OTEL_RESOURCE_ATTRIBUTES")
        if "OTEL_SERVICE_NAME" in self._values:
            found["service.name"] = self._values["OTEL_SERVICE_NAME"]
        return found

    def _name(self, what: str) -> str:
        """Return the name of a variable for traces, or for all signals if that one is not set."""
        own = f"OTEL_EXPORTER_OTLP_TRACES_{what}"
        return own if own in self._values else f"OTEL_EXPORTER_OTLP_{what}"

    def _word(self, name: str, words: tuple[str, ...]) -> str:
        value = self._values.get(name, words[0]).lower()
        if value not in words:
            raise ConfigError(f"{name} is {shown(value)}, must be one of {', '.join(words)}")
        return value

    def _number(self, name: str, default: str, *, least: float = 0.0, most: float) -> float:
        text = self._values.get(name, default)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise ConfigError(f"{name} is {shown(text)}, must be from {least:g} to {most:g}")
        return value

    def _pairs(self, name: str) -> dict[str, str]:
        """Return what is written as `name=value,name=value`, with values percent-encoded."""
        pairs = {}
        for pair in filter(None, self._values.get(name, "").split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not key.strip():
                raise ConfigError(f"{name} must be NAME=VALUE pairs with commas between")
            pairs[unquote(key.strip())] = unquote(value.strip())
        return pairs
