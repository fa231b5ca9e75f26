"""The models of all engines, as far as they are known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Status, Target


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of one engine.

    Attributes:
        parent: The base model of an adapter; None for a base model.
        max_model_len: The longest context, in tokens; None if the engine does not say.
        card: Its entry of the page.
    """

    name: str
    parent: str | None
    max_model_len: int | None
    card: Mapping[str, Any]


class ModelList:
    """What is known of the models of each engine that is up.

    Attributes:
        known: The models of each, in its order.
        adapters: The names of those that are adapters.
    """

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self.known: Mapping[Target, tuple[ServedModel, ...]] = {}
        self.adapters: frozenset[str] = frozenset()
        # By name, and of any model by "": asked for every request.
        self._longest: dict[str, int] = {}

    def update(self, known: Mapping[Target, tuple[ServedModel, ...]]) -> None:
        """Take in what is known now. It is kept, and may change until the next update."""
        self.known = known
        self._longest = self._find_longest()
        self.adapters = frozenset(one.name for one in self._all() if one.parent is not None)

    def targets(self) -> list[Target]:
        """Return the engines that are up."""
        present: list[Prefiller | Rank] = [*self._instances.prefillers, *self._instances.ranks]
        return list(dict.fromkeys(one.target for one in present if one.status is Status.UP))

    def find(self, name: str) -> ServedModel | None:
        """Return a model by its name, as some engine serves it."""
        return next((model for model in self._all() if model.name == name), None)

    def cards(self) -> list[Mapping[str, Any]]:
        """Return the entries of all models, each as the first engine that lists it shows it."""
        return list({model.name: model.card for model in reversed([*self._all()])}.values())[::-1]

    def max_model_len(self, name: str) -> int | None:
        """Return a context that no engine which is up exceeds for a model; None if one may.

        Args:
            name: The `model` of a request; empty for any model.
        """
        return self._longest.get(name)

    def _find_longest(self) -> dict[str, int]:
        if any(target not in self.known for target in self.targets()):
            return {}
        longest: dict[str, int] = {}
        unknown = set()
        for model in self._all():
            for name in ("", model.name):
                if model.max_model_len is None:
                    unknown.add(name)
                else:
                    longest[name] = max(longest.get(name, 0), model.max_model_len)
        return {name: length for name, length in longest.items() if name not in unknown}

    def _all(self) -> Iterable[ServedModel]:
        for models in self.known.values():
            yield from models
