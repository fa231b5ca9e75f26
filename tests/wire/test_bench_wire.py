"""The bench of the wire runs: what no check runs, rots."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_wire.py"


def test_the_bench_measures_every_variant(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, SCRIPT, "--quick", "--json", out], check=True, timeout=60)
    samples = json.loads(out.read_text())
    assert {work: len(variants) for work, variants in samples.items()} == {
        "relayed chunk": 3,
        "keep-alive request": 3,
        "1 MiB request": 2,
        "probe (small POST)": 3,
    }
    assert all(
        us > 0 for variants in samples.values() for figures in variants.values() for us in figures
    )
