"""Residence policy: the models that may stay in memory, by the owner's settings and pins."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.models.residents import Resident, Residents
from mlx_manager.mlx_server.models.settings import ModelSettings, ModelsFile, Wishes


class Policy:
    """The owner's wishes, applied to single models.

    Only asyncio changes the wishes, one value at a time; any thread may ask.

    Args:
        ttl: seconds without use until a model is unloaded, if its own settings name none.
    """

    def __init__(self, wishes: Wishes, ttl: float, catalog: Catalog, residents: Residents) -> None:
        self._wishes = wishes
        self._default_ttl = ttl
        self._catalog = catalog
        self._residents = residents

    @property
    def models(self) -> ModelsFile:
        return self._wishes.models

    def follow(self, models: ModelsFile) -> None:
        """Use these settings from now on."""
        self._wishes.models = models

    def pin(self, model_id: str, pinned: bool) -> None:
        self._wishes.pins[model_id] = pinned

    def of(self, model_id: str) -> ModelSettings:
        return self.models.of(model_id)

    def sampling(self, model_id: str) -> Mapping[str, float]:
        own = self.of(model_id)
        below = self.of(own.base).sampling.given() if own.is_preset and own.base else {}
        return {**below, **own.sampling.given()}

    def engine_of(self, model_id: str) -> str:
        """Return the id of the model that answers for a name: a preset's base, or the name itself.

        A base that is not on offer is loaded under the name of its first preset.
        """
        own = self.of(model_id)
        if not own.is_preset or own.base is None:
            return model_id
        if self._catalog.has(own.base):
            return own.base
        return next(n for n, s in self.models.models.items() if s.is_preset and s.base == own.base)

    def warmed(self, engine: str) -> list[str]:
        """Return the names with prompts that are read when `engine` is loaded."""
        named = self.models.models.items()
        return [name for name, own in named if own.warm and self.engine_of(name) == engine]

    def preset(self, base: str, name: str) -> str | None:
        """Return the id that `base:name` means: a preset of that base; None if there is none."""
        own = self.models.models.get(name)
        return name if own is not None and own.is_preset and own.base == base else None

    def keep(self, model_id: str, seconds: float) -> None:
        self._wishes.ttls[model_id] = seconds

    def ttl(self, model_id: str) -> float:
        if (asked := self._wishes.ttls.get(model_id)) is not None:
            return asked
        own = self.of(model_id).ttl
        return self._default_ttl if own is None else own

    def is_pinned(self, model_id: str) -> bool:
        return self._wishes.pins.get(model_id, self.of(model_id).pinned)

    def may_make_place(self, resident: Resident) -> bool:
        return not self.is_pinned(resident.id)

    def is_outdated(self, resident: Resident) -> bool:
        """Return whether a model would now be loaded from another recipe, or not at all."""
        made_otherwise = resident.recipe != self.of(resident.id).recipe
        return made_otherwise or not self._catalog.allows(resident.id)

    def is_over(self, resident: Resident) -> bool:
        """Return whether an idle model is to be unloaded even if nobody needs its place."""
        return self.is_outdated(resident) or self.rest(resident) <= 0

    def rest(self, resident: Resident) -> float:
        """Return the seconds that an idle model may still stay if nobody uses it."""
        if self.is_pinned(resident.id):
            return float("inf")
        return self.ttl(resident.id) - self._residents.idle_for(resident)
