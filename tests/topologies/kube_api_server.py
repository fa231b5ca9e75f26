"""A real API server of Kubernetes on loopback, with etcd: no node, no controller.

`make kube` builds it into build/kube/bin.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(os.environ.get("KUBE_BIN", Path(__file__).parents[2] / "build" / "kube" / "bin"))
NEEDED = (BIN / "etcd", BIN / "kube-apiserver")
IS_THERE = all(one.exists() for one in NEEDED) and shutil.which("kubectl") is not None
_ADMIN = "the-administrator"


def run(*words: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [str(one) for one in words], capture_output=True, text=True, check=False, input=text
    )


class ApiServerProcess:
    """It, and what speaks to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._etcd_port, self._peer_port, self.port = _free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self._make_keys()
        (folder / "tokens").write_text(f'{_ADMIN},admin,admin,"system:masters"\n')
        self._logs = (folder / "log").open("ab")
        self._etcd = self._begin_etcd()
        self._server: subprocess.Popen[bytes] | None = None
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def start(self) -> None:
        """Start it, or start it again, and wait until it is ready."""
        folder = self.folder
        words = [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={folder / 'api.crt'}",
            f"--tls-private-key-file={folder / 'api.key'}",
            f"--token-auth-file={folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
            "--profiling=false",
        ]
        self._server = self._begin(BIN / "kube-apiserver", *words)
        until(lambda: self.get("/readyz", plain=True) == "ok", 120.0)
        # It answers before it has its own roles.
        until(lambda: bool(self.get("/api/v1/namespaces/default")), 30.0)

    def kill(self) -> None:
        """End it; etcd stays."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def close(self) -> None:
        """End everything."""
        self.kill()
        self._etcd.kill()
        self._etcd.wait()
        self._logs.close()

    def get(self, path: str, *, plain: bool = False) -> Any:
        """Return what is at a path. Raises OSError."""
        request = urllib.request.Request(  # noqa: S310 - of loopback.
            self.url + path, headers={"Authorization": f"Bearer {_ADMIN}"}
        )
        with urllib.request.urlopen(request, timeout=10, context=self.context) as answer:  # noqa: S310
            text = answer.read().decode()
        return text if plain else json.loads(text)

    def kubectl(self, *words: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl as an administrator."""
        access = ("--server", self.url, "--token", _ADMIN)
        trust = (
            "--certificate-authority",
            self.folder / "ca.crt",
            "--cache-dir",
            self.folder / "c",
        )
        return run("kubectl", *access, *trust, *words, text=text)

    def account(self, name: str, namespace: str) -> Path:
        """Return the folder that a pod of a service account has."""
        folder = self.folder / f"account-{namespace}-{name}"
        folder.mkdir(exist_ok=True)
        made = self.kubectl("create", "token", name, "-n", namespace)
        assert made.returncode == 0, made.stderr
        shutil.copy(self.folder / "ca.crt", folder)
        (folder / "namespace").write_text(namespace)
        (folder / "token").write_text(made.stdout.strip())
        return folder

    def _begin(self, *words: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(one) for one in words], stdout=self._logs, stderr=self._logs, cwd=self.folder
        )

    def _begin_etcd(self) -> subprocess.Popen[bytes]:
        url, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        return self._begin(
            *(BIN / "etcd", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )

    def _make_keys(self) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        ca = ("-keyout", self.folder / "ca.key", "-out", self.folder / "ca.crt")
        uses = ("-addext", "keyUsage=critical,keyCertSign", "-subj", "/CN=ca")
        own = ("-keyout", self.folder / "api.key", "-out", self.folder / "api.crt")
        signed = ("-CA", self.folder / "ca.crt", "-CAkey", self.folder / "ca.key")
        names = ("-addext", "subjectAltName=IP:127.0.0.1", "-subj", "/CN=kube-apiserver")
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
        for words in ((*ca, *uses), (*own, *names, *leaf, *signed)):
            made = run("openssl", "req", "-x509", *curve, *words)
            assert made.returncode == 0, made.stderr
        run("openssl", "genrsa", "-out", self.folder / "sa.key", "2048")


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServerProcess]:
    """Run one."""
    server = ApiServerProcess(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()


def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for something that may fail until then."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            if condition():
                return
        except (OSError, urllib.error.HTTPError, ValueError):
            pass
        assert time.monotonic() < end_s, f"not within {limit_s:g} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
