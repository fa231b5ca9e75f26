"""The entry point of the group `vllm.general_plugins`.

    BALANCEROUTE_STEP_TRACE=DIR   trace the steps of every engine into DIR; without it, nothing

If `VLLM_PLUGINS` lists the plugins to load, `balanceroute_steps` must be among them.
"""

import logging
import os
import sys
from pathlib import Path

from balanceroute.engine_patch.hooks import install

VARIABLE = "BALANCEROUTE_STEP_TRACE"
ENGINE_CORE = "vllm.v1.engine.core"

_log = logging.getLogger("vllm.balanceroute")


def register() -> None:
    """Called by vLLM in each of its processes, perhaps repeatedly; never raises."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(error)
        return
    if ENGINE_CORE in sys.modules:
        _install(Path(folder))
    else:
        # Not imported here: workers never need it, and vllm-ascend patches names before they are
        # imported. An engine core that is forked from here finds its plugins loaded already.
        os.register_at_fork(after_in_child=lambda: _install(Path(folder)))


def _install(folder: Path) -> None:
    try:
        core = sys.modules.get(ENGINE_CORE)
        if core is not None:
            install(core.EngineCoreProc, folder)
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    _log.warning("balanceroute: engine steps are not traced: %s", reason)
