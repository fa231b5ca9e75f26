"""Write the list of what an engine knows: flags, variables, and keys of its JSON tables.

    python scripts/list_engine_options.py PYTHON > topologies/options/vllm-0.32.0.toml

PYTHON is an interpreter with vLLM; none of its devices is used.
"""

import subprocess
import sys
import textwrap

ASK = """
import dataclasses
import vllm
from vllm import envs
from vllm.config import CompilationConfig, KVTransferConfig
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
flags = {
    name.removeprefix("--").removeprefix("no-").replace("-", "_")
    for action in parser._actions for name in action.option_strings if name.startswith("--")
}
print("version", vllm.__version__.partition("+")[0])
print("flags", *sorted(flags))
print("compilation", *sorted(field.name for field in dataclasses.fields(CompilationConfig)))
print("kv_transfer", *sorted(field.name for field in dataclasses.fields(KVTransferConfig)))
print("variables", *sorted(n for n in envs.environment_variables if n.startswith("VLLM_")))
"""
WANTED = ("flags", "compilation", "kv_transfer", "variables")


def main() -> int:
    """Print the file."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    asked = subprocess.run(
        [sys.argv[1], "-c", ASK], capture_output=True, text=True, timeout=600, check=True
    )
    found = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    print(f"# What vLLM {found['version']} knows, by scripts/list_engine_options.py.")
    for key in WANTED:
        words = textwrap.fill(found[key], 100, break_long_words=False, break_on_hyphens=False)
        print(f'{key} = """\n{words}\n"""')
    return 0


if __name__ == "__main__":
    sys.exit(main())
