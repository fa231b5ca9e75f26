"""An API server of Kubernetes, as far as EndpointSlices go: lists in pages, watches, bookmarks, 410.

It keeps the rules of the real one: each change has the next version, a watch sends what happened
after its version, and versions before the oldest kept change are gone.
"""

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest

NAMESPACE = "serving"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
_JSON = [(b"content-type", b"application/json")]


def endpoint(host: str, *, ready: bool = True, terminating: bool = False) -> dict[str, Any]:
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    target = {"kind": "Pod", "name": host, "namespace": NAMESPACE, "uid": f"uid-{host}"}
    return {"addresses": [host], "conditions": conditions, "targetRef": target}


def slice_of(
    name: str,
    role: str,
    endpoints: list[dict[str, Any]],
    *,
    port: int = 8000,
    family: str = "IPv4",
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"balanceroute/role": role, "kubernetes.io/service-name": name},
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": [
            {"name": "api", "port": port, "protocol": "TCP"},
            {"name": "nixl", "port": 5600, "protocol": "TCP"},
        ],
    }


@dataclass
class ApiServer:
    """Serves slices at `port`, once it is started."""

    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    oldest: int = 100
    page_items: int = 500  # Slices of a page.
    failure: int = 0  # A status to answer in place of all else; 0 for none.
    silent: bool = False  # Whether it answers nothing, as one that was stopped.
    requests: list[HttpRequest] = field(default_factory=list)  # All that it got.
    watches: list[Reply] = field(default_factory=list)
    _changes: list[tuple[int, bytes]] = field(default_factory=list)

    async def start(self, ssl: Any = None, port: int = 0) -> None:
        self.server = Server(self._answer)
        await self.server.start("127.0.0.1", port, ssl=ssl)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def put(self, one: dict[str, Any]) -> None:
        """Add or change a slice."""
        name = one["metadata"]["name"]
        self._change("MODIFIED" if name in self.slices else "ADDED", one)
        self.slices[name] = one

    def delete(self, name: str) -> None:
        self._change("DELETED", self.slices.pop(name))

    def bookmark(self) -> None:
        """Tell watchers the present version alone."""
        metadata = {"resourceVersion": str(self.version)}
        thing = {"kind": "EndpointSlice", "metadata": metadata}
        self._send(json.dumps({"type": "BOOKMARK", "object": thing}).encode())

    def forget(self) -> None:
        """Keep no change: a watch from before now is answered 410, and those that run hear it too."""
        self.version += 1
        self.oldest = self.version
        self._changes.clear()

    def expire(self) -> None:
        """Forget, and tell the watches that run, which then end."""
        self.forget()
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        self._send(json.dumps({"type": "ERROR", "object": status}).encode())
        self.end_watches()

    def end_watches(self, *, broken: bool = False) -> None:
        """End the watches, as after their time, or as a server that dies."""
        for reply in self.watches:
            if broken:
                reply.abort()
            else:
                reply.end()
        self.watches.clear()

    async def close(self) -> None:
        self.end_watches(broken=True)
        self.server.close()
        await self.server.drain()

    def _change(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        line = json.dumps({"type": kind, "object": one}).encode()
        self._changes.append((self.version, line))
        self._send(line)

    def _send(self, line: bytes) -> None:
        self.watches = [reply for reply in self.watches if not reply.closed]
        for reply in self.watches:
            reply.write(line + b"\n")

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        self.requests.append(request)
        query = {key: values[0] for key, values in parse_qs(request.query.decode()).items()}
        if self.silent:
            return
        if self.failure:
            self._refuse(reply, self.failure, "it fails")
        elif request.path.decode() != PATH or "labelSelector" not in query:
            self._refuse(reply, 404, "not found")
        elif "watch" in query:
            self._watch(int(query["resourceVersion"]), reply)
        else:
            self._list(int(query["limit"]), query.get("continue", "0"), reply)

    def _list(self, limit: int, following: str, reply: Reply) -> None:
        begin, count = int(following), min(limit, self.page_items)
        items = [self.slices[name] for name in sorted(self.slices)][begin : begin + count]
        more = begin + count < len(self.slices)
        metadata = {"resourceVersion": str(self.version)}
        if more:
            metadata["continue"] = str(begin + count)
        page = {"kind": "EndpointSliceList", "metadata": metadata, "items": items}
        reply.send(200, _JSON, json.dumps(page).encode())

    def _watch(self, version: int, reply: Reply) -> None:
        if version < self.oldest:
            self._refuse(reply, 410, "too old resource version")
            return
        reply.start(200, _JSON)
        for at, line in self._changes:
            if at > version:
                reply.write(line + b"\n")
        self.watches.append(reply)

    def _refuse(self, reply: Reply, status: int, message: str) -> None:
        body = {"kind": "Status", "status": "Failure", "code": status, "message": message}
        reply.send(status, _JSON, json.dumps(body).encode())
