"""A collector that takes OTLP over HTTP as JSON, and reads it by OpenTelemetry's own schema."""

import base64
import json
from dataclasses import dataclass, field
from gzip import decompress
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest

PORT = 4318
URL = f"http://127.0.0.1:{PORT}/v1/traces"
_IDS = ("traceId", "spanId", "parentSpanId")


def read_export(body: bytes) -> Any:
    """Return an export as a message of the schema.

    Raises:
        ParseError: It is none; unknown fields are errors too.
    """
    return ParseDict(_with_base64_ids(json.loads(body)), ExportTraceServiceRequest())


def _with_base64_ids(value: Any) -> Any:
    """Return JSON with ids as protobuf's own JSON encoding has them; OTLP's has hexadecimal ones."""
    match value:
        case dict():
            return {
                key: base64.urlsafe_b64encode(bytes.fromhex(item)).decode()
                if key in _IDS
                else _with_base64_ids(item)
                for key, item in value.items()
            }
        case list():
            return [_with_base64_ids(item) for item in value]
        case _:
            return value


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes by their names."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@dataclass
class Collector:
    """Listens once it is started."""

    requests: list[HttpRequest] = field(default_factory=list)  # All that it got.
    # Statuses of the answers to come, each with headers; 200 when there is none left.
    answers: list[tuple[int, list[tuple[bytes, bytes]]]] = field(default_factory=list)
    body: bytes = b"{}"
    spans: list[Any] = field(default_factory=list)  # Those that it took.
    resources: list[dict[str, Any]] = field(default_factory=list)

    async def start(self) -> None:
        self.server = Server(self._answer)
        await self.server.start("127.0.0.1", PORT)

    async def close(self) -> None:
        self.server.close()
        await self.server.drain()

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        self.requests.append(request)
        status, headers = self.answers.pop(0) if self.answers else (200, [])
        reply.send(status, [(b"content-type", b"application/json"), *headers], self.body)
        if status != 200:
            return
        zipped = request.header(b"content-encoding") == b"gzip"
        export = read_export(decompress(request.body) if zipped else request.body)
        for of_resource in export.resource_spans:
            self.resources.append(plain(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                assert of_scope.scope.name == "balanceroute"
                self.spans += of_scope.spans
