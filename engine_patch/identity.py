"""The engine of a trace, from the engine's configuration as far as it is present.

Fields, each null if the engine does not have it:

    dp_rank         Index among the data-parallel ranks of the deployment.
    dp_size         Ranks that step in lock step with this one, itself included.
    barrier         Whether there are such ranks (a mixture of experts served data-parallel).
    dp_group        Address of the group's coordinator: equal on the ranks of one barrier.
    port            HTTP port of the API server, from its command line.
    engine, engine_version, scheduler   Software, and the class of the scheduler.
    engine_id, kv_role                  As the KV transfer knows this engine.
    model, host, pid
    started_ns      Unix time of the first step.
"""

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

_DEFAULT_PORT = 8000  # vLLM's.


def identity(engine: Any, *, started_ns: int, argv: Sequence[str]) -> dict[str, object]:
    """Return the fields of an engine.

    Args:
        engine: vLLM's engine core; read only with `getattr`.
        started_ns: Unix time of its first step.
        argv: The command line of its API server, which its own process inherits.
    """
    config = getattr(engine, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    barrier = hasattr(engine, "step_counter") and hasattr(engine, "current_wave")
    return {
        "dp_rank": _number(getattr(parallel, "data_parallel_index", None)),
        "dp_size": _number(getattr(parallel, "data_parallel_size", None)),
        "barrier": barrier,
        "dp_group": _dp_group(parallel) if barrier else None,
        "port": http_port(argv),
        "engine": "vllm",
        "engine_version": _text(getattr(sys.modules.get("vllm"), "__version__", None)),
        "scheduler": _class_name(getattr(engine, "scheduler", None)),
        "engine_id": _text(getattr(transfer, "engine_id", None)),
        "kv_role": _text(getattr(transfer, "kv_role", None)),
        "model": _text(getattr(getattr(config, "model_config", None), "model", None)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_ns": started_ns,
    }


def http_port(argv: Sequence[str]) -> int | None:
    """Return the port of vLLM's API server from its command line; None if that does not determine it."""
    port: str | None = None
    for place, word in enumerate(argv):
        if word == "--port":
            port = "".join(argv[place + 1 : place + 2])
        elif word.startswith("--port="):
            port = word.removeprefix("--port=")
    if port is not None:
        return int(port) if port.isascii() and port.isdigit() else None
    serves = "serve" in argv[1:2] or any(word.endswith("api_server.py") for word in argv[:1])
    elsewhere = any(word.split("=")[0] in {"--config", "--headless", "--uds"} for word in argv)
    return _DEFAULT_PORT if serves and not elsewhere else None


def _dp_group(parallel: Any) -> str | None:
    host = getattr(parallel, "data_parallel_master_ip", None)
    port = getattr(parallel, "data_parallel_master_port", None)
    return None if host is None or port is None else f"{host}:{port}"


def _class_name(value: Any) -> str | None:
    return None if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
