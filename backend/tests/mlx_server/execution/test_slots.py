"""Which slots sequences get, and how much memory there is for them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import PIECE, Texts
from mlx_manager.mlx_server.devices.states import DeltaShape, ShortShape, StateStore
from mlx_manager.mlx_server.execution.slots import SIZES, Slots

SHAPE = DeltaShape(1, 1, 32, 32, 2, mx.bfloat16, grouped=False, rounded=True, epsilon=1e-6)
# Of which there is a ring alone.
SHORT = ShortShape(24, 3, mx.bfloat16)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 80)), max_size=200))
def test_each_sequence_has_a_slot_of_its_own_until_it_goes(steps):
    store = StateStore(SHAPE)
    slots, held = Slots([store]), {}
    for comes, key in steps:
        if comes:
            (slot,) = slots.of([key])
            assert held.setdefault(key, slot) == slot
        else:
            slots.release(key)
            held.pop(key, None)
        assert slots.known(key) == held.get(key)
        assert len(set(held.values())) == len(held)
        assert max(held.values(), default=-1) < store.slots


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 33, 70])
@pytest.mark.parametrize("shape", [SHAPE, SHORT], ids=["states", "ring"])
def test_there_is_room_for_twice_as_many_at_most(count, shape):
    store = StateStore(shape)
    Slots([store]).of(range(count))
    assert count <= store.slots <= 2 * count
    assert sum(part.nbytes for part in store.pool) == store.slots * shape.slot_bytes


@pytest.mark.parametrize("shape", [SHAPE, SHORT], ids=["states", "ring"])
def test_what_is_in_slots_stays_when_more_are_made(shape):
    store = StateStore(shape)
    slots = Slots([store])
    slots.of([1, 2])
    for part in store.pool:
        part[1] = 7.0
    slots.of(range(1, 9))
    assert store.slots == 8
    for part, kept in zip(store.pool, store.kept(1), strict=True):
        assert kept.shape == part.shape[1:]
        assert mx.all(kept == 7.0)
        assert not mx.any(part[0])


def test_memory_goes_back_when_a_crowd_has_gone():
    store = StateStore(SHAPE)
    slots = Slots([store])
    slots.of(range(SIZES[-1] + 1))
    for key in range(SIZES[-1]):
        slots.release(key)
    assert store.slots > SIZES[-1]
    slots.clear()
    assert store.slots > SIZES[-1]
    slots.release(SIZES[-1])
    assert store.slots == 0
    slots.of([5])
    assert store.slots == SIZES[0]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(0, 20))
def test_pieces_are_all_of_the_texts_and_none_is_of_two(counts, padding):
    positions = [7 * i for i in range(len(counts))]
    slots = list(range(len(counts)))[::-1]
    texts = Texts.of(counts, slots, positions, sum(counts) + padding)
    spans, pieces = np.array(texts.spans), np.array(texts.pieces)
    assert spans[-1].tolist()[:3] == [sum(counts), padding, -1]
    covered = []
    for i, (first, count, slot, position, number) in enumerate(spans[:-1].tolist()):
        assert (count, slot, position) == (counts[i], slots[i], positions[i])
        own = pieces[number : number + -(-count // PIECE)].tolist()
        assert [piece[2] for piece in own] == [slot] + [-1] * (len(own) - 1)
        for piece_first, tokens, _, at in own:
            assert 1 <= tokens <= PIECE
            assert at - position == piece_first - first
            covered += range(piece_first, piece_first + tokens)
    assert covered == list(range(sum(counts)))
