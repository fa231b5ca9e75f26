"""What NVIDIA's aiperf measures through the proxy (https://github.com/ai-dynamo/aiperf)."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kits import LOAD_TOOL, Result, run

_LOAD_REQUESTS = 60
_LIMIT_S = 240.0
# A tokeniser of bytes, so that the load tool asks nobody for one.
_TOKENISER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters | {"<eos>": len(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(sys.argv[1])
"""


def check_aiperf(url: str, folder: Path) -> Iterator[Result]:
    """Run it, unchanged."""
    LOAD_TOOL.install()
    python = LOAD_TOOL.python
    lookup = "import importlib.metadata; print('aiperf', importlib.metadata.version('aiperf'))"
    version = run(python, "-c", lookup).stdout.strip()
    made = run(python, "-c", _TOKENISER, folder / "tokeniser")
    if made.returncode:
        yield Result(version, "a tokeniser", made.stderr[-500:])
        return
    for kind in ("chat", "completions"):
        for streaming in (True, False):
            name = f"{kind}, {'streamed' if streaming else 'whole'}"
            out = folder / name.replace(", ", "-")
            command = [python.parent / "aiperf", "profile", "--model", "emulated"]
            command += ["--url", url, "--endpoint-type", kind]
            command += ["--streaming"] if streaming else []
            command += ["--tokenizer", folder / "tokeniser", "--use-server-token-count"]
            command += ["--request-count", _LOAD_REQUESTS, "--concurrency", 16]
            # It takes an answer that ends with its first token, without a word, for none.
            command += ["--isl", 100, "--osl", 20, "--extra-inputs", "ignore_eos:true"]
            command += ["--ui-type", "none", "--artifact-dir", out]
            done = run(*command, limit_s=_LIMIT_S)
            yield Result(version, name, _wrong_with_aiperf(done, out))


def _wrong_with_aiperf(done: subprocess.CompletedProcess[str], out: Path) -> str | None:
    page = out / "profile_export_aiperf.json"
    if done.returncode or not page.exists():
        return f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    report = json.loads(page.read_text())
    served = report["request_count"]["avg"]
    if served != _LOAD_REQUESTS or report["error_summary"]:
        return f"{served:g} of {_LOAD_REQUESTS} served: {report['error_summary']}"
    return None
