"""A scenario as a TOML file.

tpot_ms = 40
tasks = ["chat", "code"]
[[group]]              # From the smallest model to the largest.
name = "small"
ranks = 4
slots = 64
step_base_ms = 8
step_us_per_token = 0.05
scores = [0.7, 0.5]    # The worth of its answers in time, by task.
"""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice.base import Targets
from balanceroute.proxy.model_choice.scenario import GroupModel, Scenario

_Count = Annotated[int, Meta(ge=1)]
_Time = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    ranks: _Count
    slots: _Count
    step_base_ms: _Positive
    step_us_per_token: _Time
    prefill_servers: Annotated[int, Meta(ge=0)] = 0
    prefill_base_ms: _Time = 0.0
    prefill_us_per_token: _Time = 0.0
    scores: list[float]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tasks: list[str]
    group: list[_Group]
    tpot_ms: _Positive | None = None
    ttft_ms: _Positive | None = None


def read_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: The file cannot be read, or says nothing sensible.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        groups = [
            {
                name: value
                for name, value in msgspec.structs.asdict(group).items()
                if name != "scores"
            }
            for group in file.group
        ]
        return Scenario(
            groups=tuple(GroupModel(**group) for group in groups),
            tasks=tuple(file.tasks),
            # In the file by group, as each is written down; here by task.
            scores=tuple(zip(*(group.scores for group in file.group), strict=True)),
            targets=Targets(file.tpot_ms, file.ttft_ms),
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
