"""The table of loaded models, and who may stay, against a plain model of both."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import Clock

from mlx_manager.mlx_server.config import CatalogSources
from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.models.policy import Policy
from mlx_manager.mlx_server.models.residents import Resident, Residents
from mlx_manager.mlx_server.models.settings import (
    AS_IT_IS,
    ModelSettings,
    ModelsFile,
    Recipe,
    Wishes,
)

IDS = st.sampled_from("abcd")
NOTHING: Any = None


@dataclass
class Plain:
    """What a loaded model should be."""

    recipe: Recipe
    used: int
    at: float
    leases: list[Resident] = field(default_factory=list)


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.residents = Residents(self.clock)
        sources = CatalogSources(default_model="a", hf_cache=False)
        self.catalog = Catalog(sources, cache_folder=Path("/nowhere"))
        self.policy = Policy(Wishes(ModelsFile()), 100.0, self.catalog, self.residents)
        self.plain: dict[str, Plain] = {}
        self.pins: dict[str, bool] = {}
        self.waiting: list[tuple[str, ExitStack]] = []
        self.settings = ModelsFile()
        self.uses = 0

    def touch(self, model_id: str) -> None:
        self.uses += 1
        self.plain[model_id].used, self.plain[model_id].at = self.uses, self.clock.now

    @rule(model_id=IDS)
    def load(self, model_id: str) -> None:
        if model_id not in self.plain:
            recipe = self.settings.of(model_id).recipe
            self.residents.add(Resident(model_id, NOTHING, NOTHING, NOTHING, recipe, NOTHING))
            self.plain[model_id] = Plain(recipe, 0, 0.0)
            self.touch(model_id)

    @rule(model_id=IDS)
    def lease(self, model_id: str) -> None:
        resident = self.residents.lease(model_id)
        assert (resident is not None) == (model_id in self.plain)
        if resident is not None:
            self.plain[model_id].leases.append(resident)
            self.touch(model_id)

    @precondition(lambda self: any(model.leases for model in self.plain.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        leased = sorted(id for id, model in self.plain.items() if model.leases)
        model_id = data.draw(st.sampled_from(leased))
        self.residents.give_back(self.plain[model_id].leases.pop())
        self.touch(model_id)

    @rule(model_id=IDS)
    def wait_for(self, model_id: str) -> None:
        waiting = ExitStack()
        waiting.enter_context(self.residents.awaited(model_id))
        self.waiting.append((model_id, waiting))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.waiting) - 1))
        self.waiting.pop(place)[1].close()

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(model_id=IDS, pinned=st.booleans())
    def pin(self, model_id: str, pinned: bool) -> None:
        self.pins[model_id] = pinned
        self.policy.pin(model_id, pinned)

    @rule(
        tables=st.dictionaries(
            IDS,
            st.builds(
                ModelSettings,
                ttl=st.sampled_from([None, 5.0, 50.0]),
                pinned=st.booleans(),
                context_length=st.sampled_from([None, 512]),
            ),
        ),
        allow=st.sampled_from([None, ("b", "c"), ("[abcd]",)]),
    )
    def configure(self, tables: dict[str, ModelSettings], allow: tuple[str, ...] | None) -> None:
        self.settings = ModelsFile(allow, tables)
        self.catalog.configure(self.settings)
        self.policy.follow(self.settings)

    def is_pinned(self, model_id: str) -> bool:
        return self.pins.get(model_id, self.settings.of(model_id).pinned)

    def is_over(self, model_id: str) -> bool:
        settings, model = self.settings.of(model_id), self.plain[model_id]
        forbidden = model_id != "a" and not self.settings.allows(model_id)
        ttl = 100.0 if settings.ttl is None else settings.ttl
        expired = self.clock.now - model.at >= ttl and not self.is_pinned(model_id)
        return forbidden or settings.recipe != model.recipe or expired

    def goes(self, removed: Resident | None, candidates: set[str]) -> None:
        """The one among the candidates that was used the longest ago, has no lease, and is waited
        for by nobody."""
        awaited = Counter(model_id for model_id, _ in self.waiting)
        free = {id: model for id, model in self.plain.items() if not awaited[id]}
        idle = {id: model.used for id, model in free.items() if not model.leases}
        fitting = {id: used for id, used in idle.items() if id in candidates}
        expected = min(fitting, key=fitting.__getitem__) if fitting else None
        assert (removed.id if removed else None) == expected
        if expected is not None:
            del self.plain[expected]

    @rule()
    def make_place(self) -> None:
        unpinned = {id for id in self.plain if not self.is_pinned(id)}
        self.goes(self.residents.remove_idle(self.policy.may_make_place), unpinned)

    @rule()
    def expire(self) -> None:
        over = {id for id in self.plain if self.is_over(id)}
        self.goes(self.residents.remove_idle(self.policy.is_over), over)

    @rule(model_id=IDS)
    def unload(self, model_id: str) -> None:
        self.goes(self.residents.remove_idle(lambda r: r.id == model_id), {model_id})

    @invariant()
    def the_table_is_the_plain_one(self) -> None:
        found = {r.id: (r.leases, r.recipe) for r in self.residents.all()}
        assert found == {id: (len(model.leases), model.recipe) for id, model in self.plain.items()}
        for resident in self.residents.all():
            model = self.plain[resident.id]
            idle = 0.0 if model.leases else self.clock.now - model.at
            assert self.residents.idle_for(resident) == idle


TestPool = Pool.TestCase


def test_a_model_that_was_made_by_no_settings_is_not_outdated_by_the_default():
    assert ModelSettings().recipe == AS_IT_IS
