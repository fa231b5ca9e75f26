"""What vLLM's CPU build lacks for the engine checks: a plugin that adds it, for tests alone.

BALANCEROUTE_CPU_SHIM names what is wanted, separated by commas:

* `mooncake`: MooncakeConnector asks an accelerator for its number; a CPU has none.
* `nixl`: its agents have a thread that polls without a pause, one core for each engine, and the HTTP
  servers of three engines starve on two cores. It waits for up to 1 ms between two looks instead. And
  its connector binds each engine to the last core of the machine, where three stand in each other's way.
* `moe-dp`: the CPU communicator has no collectives of unequal sizes, without which a mixture of
  experts with data parallelism dies at its first step.
* `hidden-lengths`: an answer ends at the length that its request names in vllm_xargs `stop_after`, which no
  proxy reads.
* `thread-times`: beside the step trace, the processor time of the thread that computes, for each step of a
  data-parallel rank: records of wave u32, step u32, nanoseconds u64 in RANK.times.
* `fork`: an engine core is forked from its API server, as on a GPU, and shares what that has imported.
  The CPU platform insists on a fresh interpreter, for the threads of OpenMP, which are one here.
"""

import functools
import os
import struct
import time
from typing import Any

# NIXL hands it to poll(), whose unit is a millisecond; an event wakes it earlier.
_NIXL_PAUSE_US = 1000


def register() -> None:
    """Apply what the environment asks for; called by vLLM in every process."""
    wanted = os.environ.get("BALANCEROUTE_CPU_SHIM", "").split(",")
    if "mooncake" in wanted:
        _number_the_cpu()
    if "nixl" in wanted:
        _poll_with_pauses()
        _use_every_core()
    if "moe-dp" in wanted:
        _add_collectives()
    if "hidden-lengths" in wanted:
        _hide_lengths()
    if "thread-times" in wanted:
        _time_threads(os.environ["BALANCEROUTE_STEP_TRACE"])
    if "fork" in wanted:
        _fork()


def _number_the_cpu() -> None:
    import torch  # type: ignore[import-not-found]

    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda *_, **__: None


def _poll_with_pauses() -> None:
    from nixl import _api  # type: ignore[import-not-found]

    original = _api.nixlBind.nixlAgent

    @functools.wraps(original)
    def patient(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = _NIXL_PAUSE_US
        return original(name, configuration)

    _api.nixlBind.nixlAgent = patient


def _use_every_core() -> None:
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    # NixlConnector's worker alone asks for it, to choose the core.
    CpuPlatform.discover_numa_topology = classmethod(lambda _: [])


def _fork() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, configuration: Any) -> None:
        original(cls, configuration)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _add_collectives() -> None:
    import torch
    import torch.distributed as dist  # type: ignore[import-not-found]
    from vllm.distributed.device_communicators import (  # type: ignore[import-not-found]
        cpu_communicator,
    )

    def gather_one(self: Any, part: Any, sizes: list[int]) -> Any:
        # Gloo gathers equal sizes only: pad to the largest and cut again.
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: part.shape[0]] = part
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([one[:size] for one, size in zip(gathered, sizes, strict=True)])

    def all_gatherv(self: Any, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        single = isinstance(parts, torch.Tensor)
        several = [parts] if single else parts
        sizes = sizes or [several[0].shape[0]] * self.world_size
        gathered = [gather_one(self, part.contiguous(), sizes) for part in several]
        return gathered[0] if single else gathered

    def reduce_scatterv(self: Any, whole: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        sizes = sizes or [whole.shape[0] // self.world_size] * self.world_size
        summed = whole.contiguous().clone()
        dist.all_reduce(summed, group=self.device_group)
        begin = sum(sizes[: self.rank_in_group])
        return summed[begin : begin + sizes[self.rank_in_group]].contiguous()

    cpu_communicator.CpuCommunicator.all_gatherv = all_gatherv
    cpu_communicator.CpuCommunicator.reduce_scatterv = reduce_scatterv


def _hide_lengths() -> None:
    from vllm.v1.core.sched import scheduler  # type: ignore[import-not-found]
    from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

    original = scheduler.check_stop

    def check_stop(request: Any, max_model_len: int) -> bool:
        if original(request, max_model_len):
            return True
        parameters = request.sampling_params
        length = ((parameters and parameters.extra_args) or {}).get("stop_after")
        if length is None or request.num_output_tokens < int(length):
            return False
        request.status = RequestStatus.FINISHED_STOPPED
        return True

    scheduler.check_stop = check_stop


def _time_threads(folder: str) -> None:
    from vllm.v1.engine.core import EngineCoreProc  # type: ignore[import-not-found]

    original = EngineCoreProc._process_engine_step
    files: dict[int, int] = {}

    def process_engine_step(self: Any) -> Any:
        rank = self.vllm_config.parallel_config.data_parallel_index
        if rank not in files:
            files[rank] = os.open(f"{folder}/{rank}.times", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        place = getattr(self, "current_wave", 0), getattr(self, "step_counter", 0)
        begin_ns = time.thread_time_ns()
        result = original(self)
        os.write(files[rank], struct.pack("<IIQ", *place, time.thread_time_ns() - begin_ns))
        return result

    EngineCoreProc._process_engine_step = process_engine_step
