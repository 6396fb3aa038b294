"""Every family that sees, through the engine as it is chosen: prompts that are cut, beside a text
and read from pages, draw what they draw whole and alone."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path

import pytest
from engine.rig import EventStream, RecordingParser, prompt
from thorough import every_other
from tiny_vision import SEEING, loaded_from, make_seeing_model, picture

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import Conversation, Message, Sampling
from mlx_manager.mlx_server.engine.prompt_images import PromptImages
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.text_engine import TextEngine
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.formats import PLAIN
from mlx_manager.mlx_server.models.loading.load import LoadedModel
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.utils.memory import Ledger

LIMIT = 10


class Engine:
    """An engine of a model that sees, with the model's own tower."""

    def __init__(self, loaded: LoadedModel, **limits: int) -> None:
        assert loaded.vision is not None
        self._texts = TokenTexts(loaded.tokenizer)
        forward = choose(loaded.model, 16, vision=loaded.vision)
        self.engine = TextEngine(
            "tiny",
            forward,
            EngineLimits(**limits),
            Ledger(1 << 32, cache_bytes=lambda: 0),
            looks_ahead=forward.looks_ahead,
            tower=loaded.vision.tower,
        )

    def submit(
        self, ids: Rows[int], images: PromptImages | None, limit: int = LIMIT
    ) -> tuple[Sequence, RecordingParser]:
        parser = RecordingParser(self._texts.stream(PLAIN), PLAIN, ())
        sequence = Sequence(
            list(ids),
            limit=limit,
            stop_ids=frozenset(),
            min_tokens=0,
            sampler=SamplerState.of(Sampling(temperature=0.0), list(ids)),
            parser=parser,
            stream=EventStream(),
            images=images,
        )
        self.engine.submit(sequence)
        return sequence, parser

    def run(self) -> None:
        while self.engine.has_work():
            self.engine.step()


def asked(loaded: LoadedModel) -> tuple[list[int], PromptImages]:
    """The tokens of a question about two pictures, and the pictures at their places."""
    images = [picture(100, 70, 1), picture(60, 90, 2)]
    content = ("Look: ", images[0], " and ", images[1], " what?")
    conversation = Conversation((Message("user", content),))
    vision = loaded.vision
    assert vision is not None
    rendered = loaded.adapter.render(conversation, loaded.tokenizer)
    layouts = vision.layouts(images)
    text = vision.expanded(rendered.marked, layouts, "messages")
    ids = loaded.adapter.encode_text(text, loaded.tokenizer, rendered.cut)
    return vision.placed(ids, images, layouts, "messages")


@pytest.mark.parametrize("kind", every_other(sorted(SEEING)))
async def test_what_is_drawn_about_pictures_does_not_depend_on_how_they_are_processed(
    kind: str, tmp_path: Path
) -> None:
    folder = make_seeing_model(tmp_path / "m", kind)
    loaded = loaded_from(folder)
    question = asked(loaded)
    whole = Engine(loaded)
    _, alone = whole.submit(*question)
    whole.run()
    whole.engine.close()

    cut = Engine(loaded_from(folder), prefill_chunk=16)
    cut.submit(prompt(30), None, 60)
    for _ in range(3):
        cut.engine.step()
    _, beside = cut.submit(*question)
    cut.run()
    slices = cut.engine.steps - cut.engine.stats().steps
    again, from_pages = cut.submit(*question)
    cut.run()
    assert len(alone.tokens) == LIMIT
    assert beside.tokens == alone.tokens
    assert from_pages.tokens == alone.tokens
    assert again.cached is not None
    assert again.cached >= 64
    assert cut.engine.steps - cut.engine.stats().steps == slices
    cut.engine.close()
