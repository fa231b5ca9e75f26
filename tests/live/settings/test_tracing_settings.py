"""Where traces go: the flags, the file, and the variables of OpenTelemetry."""

from pathlib import Path

import pytest
from tests.live.settings.configs import of_file, of_flags

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import Secret
from balanceroute.proxy.live.settings.tracing import ExportSettings

PLACE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def of_variables(**variables: str) -> ExportSettings:
    config = of_flags({PLACE: "http://collector:4318"} | variables)
    assert config.tracing is not None
    return config.tracing


def test_nothing_is_traced_unless_somebody_asks(tmp_path: Path) -> None:
    assert of_flags().tracing is None
    assert of_file(tmp_path).tracing is None
    assert of_flags({PLACE: "http://a", "OTEL_SDK_DISABLED": "TRUE"}).tracing is None
    assert of_flags({PLACE: "http://a", "OTEL_TRACES_EXPORTER": "none"}).tracing is None
    assert of_flags({PLACE: " "}).tracing is None


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://collector", ("http", "collector", 80, "/v1/traces")),
        ("http://collector:4318/v1/traces", ("http", "collector", 4318, "/v1/traces")),
        ("https://api.example/otlp/v1/traces", ("https", "api.example", 443, "/otlp/v1/traces")),
        ("http://[::1]:4318", ("http", "::1", 4318, "/v1/traces")),
    ],
)
def test_the_flag_and_the_file_name_the_collector(
    url: str, place: tuple[str, str, int, str], tmp_path: Path
) -> None:
    for config in (
        of_flags(otlp_traces_endpoint=url),
        of_file(tmp_path, f'otlp_traces_endpoint = "{url}"'),
        # The flag goes before the variables.
        of_flags({PLACE: "http://other"}, otlp_traces_endpoint=url),
    ):
        found = config.tracing
        assert found is not None
        assert (found.scheme, found.host, found.port, found.path) == place
        assert (found.share, found.headers, found.gzip, found.timeout_s) == (1.0, (), False, 10.0)


def test_the_variables_mean_what_they_mean_to_the_sdks() -> None:
    assert of_variables().path == "/v1/traces"
    assert of_variables(**{PLACE: "http://collector:4318/base/"}).path == "/base/v1/traces"
    own = of_variables(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="https://traces.example/in?x=1")
    assert (own.scheme, own.host, own.path) == ("https", "traces.example", "/in?x=1")
    told = of_variables(
        OTEL_EXPORTER_OTLP_HEADERS="api-key=a%20b,other=c",
        OTEL_EXPORTER_OTLP_TIMEOUT="2500",
        OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="500",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_SERVICE_NAME="edge",
        OTEL_RESOURCE_ATTRIBUTES="service.name=less,deployment.environment.name=prod",
    )
    assert told.headers == (("api-key", Secret(b"a b")), ("other", Secret(b"c")))
    assert told.timeout_s == 0.5
    assert told.gzip
    resource = dict(told.resource)
    assert resource["service.name"] == "edge"
    assert resource["deployment.environment.name"] == "prod"
    assert dict(of_variables().resource)["service.name"] == "balanceroute"


@pytest.mark.parametrize(
    ("sampler", "argument", "share"),
    [
        ("parentbased_always_on", "0.1", 1.0),
        ("parentbased_always_off", "", 0.0),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "", 1.0),
    ],
)
def test_the_sampler_gives_the_share_unless_the_flag_does(
    sampler: str, argument: str, share: float
) -> None:
    variables = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert of_variables(**variables).share == share
    config = of_flags({PLACE: "http://collector"} | variables, trace_share=0.5)
    assert config.tracing is not None
    assert config.tracing.share == 0.5


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({PLACE: "collector:4317"}, f"{PLACE} is 'collector:4317/v1/traces', must be http://"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', must be one of http/protobuf, http/json",
        ),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin', must be one of"),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, "OTEL_TRACES_SAMPLER is 'always_on', must be one"),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG is '2', must be from 0 to 1",
        ),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "key"}, "must be NAME=VALUE pairs with commas between"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0ac"}, "'a' is no header, or has no value of one"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "TIMEOUT is 'soon', must be from 1 to 1e+09"),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/absent"}, "CERTIFICATE is /absent: No such file"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "br"}, "COMPRESSION is 'br', must be one of none, g"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_variables(**variables)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"otlp_traces_endpoint": "collector"}, "--otlp-traces-endpoint is 'collector', must be"),
        ({"otlp_traces_endpoint": "http://a@3"}, "is 'http://a@3': a collector has no rank"),
        ({"otlp_traces_endpoint": "http://u:p@a"}, "must not carry credentials"),
        ({"trace_share": 0.5}, "--trace-share: means nothing without --otlp-traces-endpoint"),
        ({"trace_share": 1.5}, "--trace-share is 1.5, must be from 0 to 1, or 'auto'"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_flags(**flags)
    assert message in str(caught.value)


def test_keys_of_the_collector_are_not_shown() -> None:
    config = of_flags({PLACE: "http://a", "OTEL_EXPORTER_OTLP_HEADERS": "api-key=hidden"})
    assert "hidden" not in f"{config.redacted()} {config}"
