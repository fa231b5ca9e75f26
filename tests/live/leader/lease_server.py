"""An API server of Kubernetes, as far as Leases go, that can be slow, silent, gone, or wrong."""

import asyncio
import json
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest

FOLDER = "/apis/coordination.k8s.io/v1/namespaces/serving/leases"
NAME = "balanceroute"
_JSON = [(b"content-type", b"application/json")]


@dataclass
class LeaseServer:
    """Serves one Lease at `port`, once it is started.

    It keeps the rules of the real one: a write needs the present version, and one that changes nothing
    leaves the version as it is.
    """

    lease: dict[str, Any] | None = None
    version: int = 100
    failure: int = 0  # A status to answer in place of all else; 0 for none.
    silent: bool = False  # Whether it neither acts nor answers.
    deaf_answers: bool = False  # Whether it acts, and answers nothing.
    delay_s: float = 0.0  # Until it answers. It acts at once.
    late_s: float = 0.0  # Until it acts.
    answer: bytes | None = None  # In place of the Lease, with status 200.
    requests: list[HttpRequest] = field(default_factory=list)

    async def start(self, port: int = 0) -> None:
        self.server = Server(self._take)
        await self.server.start("127.0.0.1", port)
        self.port = self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    @property
    def holder(self) -> str:
        return "" if self.lease is None else str(self.spec.get("holderIdentity") or "")

    def edit(self, **spec: object) -> None:
        """Change it by hand; None takes a field away."""
        assert self.lease is not None
        changed = self.spec | spec
        self._put({**self.lease, "spec": {k: v for k, v in changed.items() if v is not None}})

    def delete(self) -> None:
        self.lease = None
        self.version += 1

    async def close(self) -> None:
        self.server.close()
        await self.server.drain()

    def _put(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    def _take(self, request: HttpRequest, reply: Reply) -> None:
        self.requests.append(request)
        if self.silent:
            return
        if self.late_s:
            asyncio.get_running_loop().call_later(self.late_s, self._act, request, reply)
        else:
            self._act(request, reply)

    def _act(self, request: HttpRequest, reply: Reply) -> None:
        status, thing = self._done(request)
        body = json.dumps(thing).encode()
        if self.answer is not None:
            status, body = 200, self.answer
        if self.deaf_answers:
            return
        asyncio.get_running_loop().call_later(self.delay_s, reply.send, status, _JSON, body)

    def _done(self, request: HttpRequest) -> tuple[int, dict[str, Any]]:
        path = request.path.decode()
        if self.failure:
            return _status(self.failure, "it fails")
        if path == FOLDER and request.method == b"POST":
            if self.lease is not None:
                return _status(409, "already exists")
            return 201, self._put(json.loads(request.body))
        if path != f"{FOLDER}/{NAME}" or self.lease is None:
            return _status(404, "not found")
        if request.method == b"PUT":
            told = json.loads(request.body)
            if told["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                return _status(409, "the object has been modified")
            if told != self.lease:
                self._put(told)
        return 200, self.lease


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "code": code, "message": message}
