"""Places and positions of pictures in prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_vision import SEEING, loaded_from, make_seeing_model, picture

from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.vision.prompts import Vision, angles_of

GRIDS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4)


@given(GRIDS, st.integers(0, 5))
def test_positions_are_those_of_transformers(
    pictures: list[tuple[int, int, int]], last: int
) -> None:
    """Each picture follows so many tokens of text; written out one token at a time."""
    expected: list[tuple[int, int, int]] = []
    places = []
    position = 0
    for before, height, width in pictures:
        expected += [(position + n,) * 3 for n in range(before)]
        position += before
        places.append(np.arange(len(expected), len(expected) + height * width))
        expected += [
            (position, position + y, position + x) for y in range(height) for x in range(width)
        ]
        position += max(height, width)
    expected += [(position + n,) * 3 for n in range(last)]
    grids = [(height, width) for _, height, width in pictures]
    found = angles_of(len(expected), places, grids)
    assert found.dtype == np.int32
    assert found.T.tolist() == [list(angles) for angles in expected]


@pytest.fixture(scope="module", params=sorted(SEEING))
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder: Path = make_seeing_model(tmp_path_factory.mktemp(request.param), request.param)
    found = loaded_from(folder).vision
    assert found is not None
    return found


def test_rows_of_each_picture_stand_at_its_own_places(vision: Vision) -> None:
    images = [picture(100, 60), picture(30, 31, 1), picture(100, 60)]
    layouts = vision.layouts(images)
    ids = [1]
    for layout in layouts:
        ids += [2, *[vision.row, 3] * len(layout.runs)]
    tokens, seen = vision.placed(ids, images, layouts, "messages")
    assert [sum(layout.runs) for layout in layouts] == [len(p.places) for p in seen.pictures]
    rows = [place for place, token in enumerate(tokens) if token == vision.row]
    assert np.concatenate([each.places for each in seen.pictures]).tolist() == rows
    assert [token for token in tokens if token != vision.row] == [
        token for token in ids if token != vision.row
    ]
    assert [each.image for each in seen.pictures] == images
    first, second, third = (each.digest for each in seen.pictures)
    assert first == third != second
    assert all(each.places.dtype == np.int32 for each in seen.pictures)


def test_positions_after_a_prompt_are_shifted_where_pictures_take_fewer(vision: Vision) -> None:
    images = [picture(100, 60)]
    layouts = vision.layouts(images)
    ids = [1, *[vision.row, 3] * len(layouts[0].runs)]
    tokens, seen = vision.placed(ids, images, layouts, "messages")
    assert (seen.angles is None) == (vision.mrope is None)
    if seen.angles is not None:
        assert seen.angles.shape == (3, len(tokens))
        assert seen.angles[:, -1].tolist() == [len(tokens) - 1 + seen.shift] * 3
        assert seen.shift < 0
    else:
        assert seen.shift == 0


def test_other_tokens_than_the_layouts_are_refused(vision: Vision) -> None:
    images = [picture(30, 30)]
    layouts = vision.layouts(images)
    with pytest.raises(InvalidRequest, match="as its family does"):
        vision.placed([1, 2, 3], images, layouts, "messages")
    with pytest.raises(InvalidRequest, match="shows 0 of 1 pictures"):
        vision.expanded("no picture", layouts, "messages")
