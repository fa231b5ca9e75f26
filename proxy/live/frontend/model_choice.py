"""Which deployment serves a model: the seam for several models behind one proxy."""

from collections.abc import Collection
from typing import Protocol


class ModelChoice(Protocol):
    """Decides whether, and later where, a model is served."""

    def refuse(self, model: str) -> str | None:
        """Return why `model` is not served here, or None if it is."""
        ...


class AnyModel:
    """Leaves the answer to the engines, which know their names and adapters."""

    def refuse(self, model: str) -> str | None:
        """Refuse nothing."""
        del model
        return None


class ListedModels:
    """Serves the models on a list."""

    def __init__(self, models: Collection[str]) -> None:
        self._models = list(models)

    def refuse(self, model: str) -> str | None:
        """Refuse a model that is not on the list, in vLLM's words. No name is left to the engine."""
        if not model or model in self._models:
            return None
        return (
            f"The model `{model[:128]}` does not exist. Valid aliases: {', '.join(self._models)}."
        )
