"""An engine over a tiny model that sees, and a tower whose work is seen."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
from engine.rig import EventStream, HandRig, RecordingParser, Rig, Row
from mlx_lm.utils import load_tokenizer
from seeing import Scene, SeeingFamily, random_features
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import Image, Sampling
from mlx_manager.mlx_server.engine.prompt_images import Features, Picture, PromptImages
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.text_engine import TextEngine
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.formats import PLAIN
from mlx_manager.mlx_server.text.detokenizer import TokenTexts

STAGES = 4


class RandomTower:
    """A tower whose features are random numbers by the picture's digest, made in `STAGES` slices.

    read: digests of the pictures whose pixels were read. begun: those that were begun. slices: of
    all. broken: digests that fail, in `pixels` or in the second slice.
    """

    def __init__(self, family: SeeingFamily) -> None:
        own = family.config.get("text_config", family.config)
        self.width, self.levels = own["hidden_size"], family.levels
        self.read: list[str] = []
        self.begun: list[str] = []
        self.slices = 0
        self.broken: dict[str, Exception] = {}
        self.unreadable: dict[str, Exception] = {}
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no pixels come meanwhile."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def pixels(self, image: Image) -> Image:
        self._open.wait(30)
        self.read.append(image.digest)
        if image.digest in self.unreadable:
            raise self.unreadable[image.digest]
        return image

    def stages(self, image: Image) -> Generator[list[mx.array], None, Features]:
        self.begun.append(image.digest)
        for number in range(STAGES):
            self.slices += 1
            if number == 1 and image.digest in self.broken:
                raise self.broken[image.digest]
            yield [mx.ones((64, 64)) @ mx.ones((64, 64))]
        return self.features(image)

    def features(self, image: Image) -> Features:
        rows = image.width * image.height
        return random_features(rows, self.width, self.levels, seed=int(image.digest))


def picture(number: int, places: np.ndarray, grid: tuple[int, int]) -> Picture:
    image = Image(b"", str(number), grid[1], grid[0])
    return Picture(image, image.digest, places)


class SeeingRig(HandRig):
    """A rig of a model that sees, which the test steps itself."""

    def __init__(self, family: SeeingFamily, folder: Path, **how: object) -> None:
        super().__init__(make_tiny_model(folder / "m", "llama"), **how)  # type: ignore[arg-type]
        self.family = family
        self.tower = RandomTower(family)

    def _load(self) -> None:
        self.model = self.family.model()
        self.tokenizer = load_tokenizer(self._folder)
        self.texts = TokenTexts(self.tokenizer)
        chosen = self._choose is not choose
        self.forward = (
            self._choose(self.model, self._limits.page_size)
            if chosen
            else choose(self.model, self._limits.page_size, vision=self.family)
        )
        self._open_disk(lambda: None)
        self.engine = TextEngine(
            "tiny",
            self.forward,
            self._limits,
            self.ledger,
            looks_ahead=self._looks_ahead or self.forward.looks_ahead,
            size=self._size,
            clock=self._clock,
            tower=self.tower,
            wake=self._wake,
            disk=self.disk,
        )
        self.thread.attach(self.engine)

    _wake = None

    def seen(
        self,
        scene: Scene,
        grids: tuple[tuple[int, int], ...],
        numbers: tuple[int, ...],
        limit: int = 4,
        *,
        whole: bool = False,
        priority: int = 0,
        salt: str = "",
    ) -> Row:
        """A sequence with pictures of these numbers in the scene's places."""
        prompt = scene.tokens[: scene.prompt]
        pictures = tuple(
            picture(number, places, grid)
            for number, places, grid in zip(numbers, scene.places, grids, strict=True)
        )
        stream = EventStream()
        parser = RecordingParser(self.texts.stream(PLAIN), PLAIN, ())
        sequence = Sequence(
            prompt,
            limit=limit,
            stop_ids=frozenset(),
            min_tokens=0,
            sampler=SamplerState.of(Sampling(temperature=0.0), prompt),
            parser=parser,
            stream=stream,
            priority=priority,
            images=PromptImages(pictures, scene.angles, scene.shift, whole),
            salt=salt,
        )
        return Row(sequence, parser, stream)

    def look(self, *args: object, **kwargs: object) -> Row:
        """Submit such a sequence."""
        row = self.seen(*args, **kwargs)  # type: ignore[arg-type]
        self.submit_together([row])
        return row


class ThreadedSeeingRig(SeeingRig):
    """The same, on a thread of its own."""

    __aenter__ = Rig.__aenter__
    __aexit__ = Rig.__aexit__
    submit = Rig.submit
    submit_together = Rig.submit_together
    cancel = Rig.cancel

    def _wake(self) -> None:  # type: ignore[override]
        self.thread.post(lambda: None)
