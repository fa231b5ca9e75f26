"""Configurations made of flags, or of a topology file."""

import json
from collections.abc import Mapping
from pathlib import Path

from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.declared import SECTIONS
from balanceroute.topologies.topology import read_topology

P = EngineUrl("http", "p", 80)
D = EngineUrl("http", "d", 80)
ENGINES = '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\n'


SETTINGS = {one.name: one for section in SECTIONS for one in settings_of(section)}


def of_flags(environment: Mapping[str, str] | None = None, /, **flags: object) -> ProxyConfig:
    """Return the configuration of two engines and some flags."""
    engines: dict[str, object] = {"prefill": ["http://p"], "decode": ["http://d"]}
    return make_config(None, engines | flags, environment=environment or {})


def of_file(
    folder: Path,
    proxy: str = "",
    *,
    engines: str = ENGINES,
    top: str = "",
    flags: Mapping[str, object] | None = None,
) -> ProxyConfig:
    """Return the configuration of a topology file and some flags."""
    path = folder / "fleet.toml"
    path.write_text(f'name = "x"\n{top}\n{engines}\n[proxy]\n{proxy}\n')
    return make_config(read_topology(path), flags or {})


def toml(value: object) -> str:
    return json.dumps(value)


def secret_file(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content)
    path.chmod(0o600)
    return str(path)
