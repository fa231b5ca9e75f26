"""Topologies with real engines, as small as they can be, for the tests of this folder."""

from pathlib import Path

from balanceroute.topologies.engines import Engines
from balanceroute.topologies.topology import Topology, read_topology

TOP = """
name = "small"
connector = "{connector}"
{top}
[engines]
weights = "w"
device = "cuda"
devices_per_host = 8
proxy_host = "10.0.0.9"
{engines}
[engines.prefill]
hosts = ["10.0.0.1"]
port = 8100
max_num_seqs = 8
{prefill}
[engines.decode]
hosts = ["10.0.0.2"]
port = 8200
max_num_seqs = 16
{decode}
"""
# What each connector needs at least, by role.
PORTS = {
    "nixl": ("side_channel_port = 5600", "side_channel_port = 5600"),
    "mooncake": ("bootstrap_port = 8998", ""),
    "mooncake-ascend": ("kv_port = 36000", "kv_port = 36000"),
    "mooncake-hybrid": ("kv_port = 36000", "kv_port = 36000"),
    "mooncake-layerwise": ("kv_port = 36000", "kv_port = 36000"),
}


def text(
    connector: str = "nixl",
    *,
    top: str = "",
    engines: str = "",
    prefill: str = "",
    decode: str = "",
) -> str:
    """Return a file. A line given replaces that of the same key."""
    of_prefill, of_decode = PORTS[connector]
    content = TOP.format(
        connector=connector,
        top=top,
        engines="",
        prefill=of_prefill,
        decode=of_decode,
    )
    if connector not in ("nixl", "mooncake"):
        engines = f'device = "npu"\n{engines}'
    sections = content.split("[engines")
    for i, lines in ((1, engines), (2, prefill), (3, decode)):
        for line in lines.splitlines():
            key = line.partition(" = ")[0]
            kept = [old for old in sections[i].splitlines() if old.partition(" = ")[0] != key]
            sections[i] = "\n".join([*kept, line, ""])
    return "[engines".join(sections)


def read(folder: Path, content: str) -> Topology:
    """Write a file and read it."""
    path = folder / "fleet.toml"
    path.write_text(content)
    return read_topology(path)


def engines_of(folder: Path, content: str) -> Engines:
    """Write a file and return its engines."""
    engines = read(folder, content).engines
    assert engines is not None
    return engines
