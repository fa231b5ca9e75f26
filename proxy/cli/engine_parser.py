"""The parser of an installed vLLM, asked whether it takes the commands of a topology."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.topologies import Command

TIMEOUT_S = 600
# Run by the other interpreter, which need not have this package; it uses no accelerator.
_ASK = """
import contextlib, io, json, sys
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

def ask(words):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        validate_parsed_serve_args(arguments)
        engine = AsyncEngineArgs.from_cli_args(arguments)
    except SystemExit:
        return [said.getvalue().strip().rpartition("error: ")[2], {}]
    except Exception as error:
        return [str(error) or repr(error), {}]
    transfer = engine.kv_transfer_config
    values = {"port": arguments.port, "kv_connector": transfer.kv_connector}
    values |= {"kv_role": transfer.kv_role, "kv_policy": transfer.kv_load_failure_policy}
    names = "data_parallel_size data_parallel_rank max_num_seqs pipeline_parallel_size nnodes node_rank"
    for name in names.split():
        values[name] = getattr(engine, name, None)  # Old versions lack some.
    return ["", values]

found = [ask(words) for words in json.load(sys.stdin)]
print(json.dumps({"version": vllm.__version__, "found": found}))
"""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the parser made of one command: the fault, "" if there is none, and some values."""

    fault: str
    values: Mapping[str, object]


def parse_with(python: str, commands: Sequence[Command]) -> tuple[str, list[Parsed]]:
    """Return the version of an interpreter's vLLM, and what its parser makes of engine commands.

    Raises:
        ConfigError: The interpreter or its vLLM cannot be used.
    """
    # vLLM takes the model as the first word after `serve`.
    words = [[word for item in command.words for word in item][2:] for command in commands]
    try:
        ran = subprocess.run(  # noqa: S603 - the user names the interpreter.
            [python, "-c", _ASK],
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python: {error}") from error
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--engine-python: {python} cannot ask its vLLM: {last}")
    answer = json.loads(ran.stdout.strip().rpartition("\n")[2])
    return answer["version"], [Parsed(fault, values) for fault, values in answer["found"]]


def installed_python() -> str | None:
    """Return this interpreter if vLLM is installed beside this package, else None."""
    return sys.executable if find_spec("vllm") is not None else None
