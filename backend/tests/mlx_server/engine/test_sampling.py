"""Sampling against plain arithmetic: what is kept, what is drawn how often, and that a row gets
the same tokens alone as in any company."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.engine.sampling import (
    BLOCK,
    CANDIDATES,
    SamplerState,
    SamplingBatch,
    every_way,
    sample,
)

# Below, above and at multiples of a block, and beyond the candidates that are tried first.
VOCABULARIES = [2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 1000]


def draw(logits: np.ndarray, states: list[SamplerState], drawn: int = 0) -> list:
    return sampled(mx.array(logits.astype(np.float32)), states, drawn)


def sampled(logits: mx.array, states: list[SamplerState], drawn: int = 0) -> list:
    """The next token of each row, after so many."""
    return sample(logits, SamplingBatch(states), [drawn] * len(states)).tolist()


def state(seed: int = 0, prompt: tuple[int, ...] = (), **wishes: object) -> SamplerState:
    return SamplerState.of(Sampling(seed=seed, **wishes), prompt)  # type: ignore[arg-type]


def continue_with(states: list[SamplerState], tokens: list[int]) -> None:
    for row, token in zip(states, tokens, strict=True):
        row.advance(token)


# ---------------------------------------------------------------------------------------------
# In company as alone
# ---------------------------------------------------------------------------------------------


@st.composite
def wishes(draw: st.DrawFn) -> Sampling:
    def sometimes(default: float, values: st.SearchStrategy[float]) -> float:
        return draw(st.one_of(st.just(default), values))

    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9])),
        top_p=sometimes(1.0, st.floats(0.01, 1.0)),
        top_k=int(sometimes(0, st.integers(1, 400))),
        min_p=sometimes(0.0, st.floats(0.0, 1.0)),
        seed=draw(st.integers(0, 2**63)),
        presence_penalty=sometimes(0.0, st.floats(-2, 2)),
        frequency_penalty=sometimes(0.0, st.floats(-2, 2)),
        repetition_penalty=sometimes(1.0, st.floats(0.5, 2)),
        logit_bias=tuple(
            draw(
                st.lists(
                    st.tuples(st.integers(0, 69), st.floats(-100, 100)),
                    max_size=3,
                    unique_by=lambda entry: entry[0],
                )
            )
        ),
    )


@settings(max_examples=60)
@given(
    asked=st.lists(wishes(), min_size=2, max_size=6),
    vocabulary=st.sampled_from([70, 128, 700]),
    seed=st.integers(0, 100),
)
def test_a_row_draws_in_company_what_it_draws_alone(
    asked: list[Sampling], vocabulary: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed)
    together = [SamplerState.of(s, (1, 2, 3)) for s in asked]
    alone = [SamplerState.of(s, (1, 2, 3)) for s in asked]
    together[0].banned = alone[0].banned = (0, 5)
    for step in range(3):
        logits = 3 * numbers.standard_normal((len(asked), vocabulary))
        drawn = draw(logits, together, step)
        assert drawn == [draw(logits[i : i + 1], [row], step)[0] for i, row in enumerate(alone)]
        continue_with(together, drawn)
        continue_with(alone, drawn)


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    logits = np.zeros((1, 5000))

    def draws(seed: int | None) -> list[int]:
        row = SamplerState.of(Sampling(seed=seed), ())
        return [token for drawn in range(8) for token in draw(logits, [row], drawn)]

    assert draws(7) == draws(7)
    assert len({tuple(draws(seed)) for seed in range(20)}) == 20
    assert draws(None) != draws(None)
    assert draws(-1) == draws(2**64 - 1)


def test_the_logits_given_are_not_changed() -> None:
    logits = mx.random.normal((2, 100), key=mx.random.key(0))
    before = np.array(logits)
    rows = [state(1, (3, 4), repetition_penalty=1.3, top_k=5, logit_bias=((7, 5.0),)), state(2)]
    continue_with(rows, sampled(logits, rows))
    sampled(logits, rows)
    assert np.array_equal(np.array(logits), before)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_logits_are_sampled_as_their_exact_values(dtype: mx.Dtype) -> None:
    rows = [state(i, top_p=0.8, temperature=0.9) for i in range(16)]
    half = (mx.random.normal((16, 500), key=mx.random.key(0)) * 3).astype(dtype)
    assert sampled(half, rows) == sampled(half.astype(mx.float32), rows)


# ---------------------------------------------------------------------------------------------
# What is kept
# ---------------------------------------------------------------------------------------------


def kept(logits: np.ndarray, s: Sampling) -> set[int]:
    """The tokens that may be drawn: top_k of the scaled logits, of these top_p, then min_p; what
    is tied with the last one kept is kept."""
    scaled = logits.astype(np.float64) / s.temperature
    order = np.argsort(-scaled, kind="stable")
    if s.top_k:
        order = order[: s.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    whole = weights.sum()
    before = np.cumsum(weights) - weights
    inside = before < s.top_p * whole if s.top_p < 1 else np.ones(len(order), bool)
    inside[0] = True
    lowest = scaled[order[inside][-1]]
    if s.min_p:
        lowest = max(lowest, scaled[order[0]] + math.log(s.min_p))
    return set(np.flatnonzero(scaled >= lowest - 1e-6).tolist())


def reachable(logits: np.ndarray, s: Sampling, draws: int = 4000) -> set[int]:
    """What many rows with the same wishes and different seeds draw from the same logits."""
    rows = [SamplerState.of(replace(s, seed=seed), ()) for seed in range(draws)]
    return set(draw(np.broadcast_to(logits, (draws, logits.size)), rows))


@pytest.mark.parametrize(
    "wishes",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 299},
        {"top_k": 1000},
        {"top_p": 0.0},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 20, "top_p": 0.99, "min_p": 0.2},
        {"top_p": 0.8, "temperature": 0.3},
        {"min_p": 0.2, "temperature": 1.8},
    ],
    ids=str,
)
def test_the_filters_keep_what_they_say(wishes: dict[str, float]) -> None:
    # Evenly falling, each token twice: every one that is kept is drawn, and ties are met.
    logits = np.repeat(np.linspace(0, -4.5, 150), 2)
    np.random.default_rng(0).shuffle(logits)
    asked = Sampling(**wishes)  # type: ignore[arg-type]
    allowed = kept(logits, asked)
    seen = reachable(logits, asked)
    assert seen <= allowed
    weights = np.exp(logits / asked.temperature)
    likely = {
        token
        for token in allowed
        if weights[token] / sum(weights[other] for other in allowed) > 1 / 400
    }
    assert likely <= seen


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([*VOCABULARIES, CANDIDATES + 200]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 600)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    coarse=st.booleans(),
)
def test_nothing_is_drawn_that_the_filters_exclude(
    seed: int,
    vocabulary: int,
    spread: float,
    top_k: int,
    top_p: float,
    min_p: float,
    coarse: bool,
) -> None:
    numbers = np.random.default_rng(seed)
    logits = spread * numbers.standard_normal(vocabulary)
    if coarse:
        logits = np.round(logits)
    asked = Sampling(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    # At a border that rounding may put on either side of a token, both are right.
    allowed = kept(logits, asked) | kept(logits, replace(asked, top_p=min(1.0, top_p + 1e-5)))
    assert reachable(logits, asked, 64) <= allowed


def test_a_filter_of_one_row_leaves_the_others_alone() -> None:
    logits = np.tile(np.zeros(400), (300, 1))
    rows = [state(seed, top_k=2 if seed % 3 == 0 else 0, top_p=1.0) for seed in range(300)]
    drawn = draw(logits, rows)
    # All are tied, so even these keep everything; what matters is that nobody is cut.
    assert max(drawn) > 300
    logits[:, :2] = 1e-3
    drawn = draw(logits, rows)
    assert {drawn[i] for i in range(0, 300, 3)} <= {0, 1}
    assert len({drawn[i] for i in range(300) if i % 3}) > 100


def test_rows_that_keep_different_numbers_of_tokens_share_a_batch() -> None:
    vocabulary, many = 600, 500
    logits = np.tile(-0.01 * np.arange(vocabulary), (many, 1))
    asked = [
        Sampling(seed=i, top_k=[1, 2, 5, 300, 0][i % 5], top_p=[1.0, 0.5][i % 2])
        for i in range(many)
    ]
    drawn = draw(logits, [SamplerState.of(s, ()) for s in asked])
    for i in range(10):
        allowed = kept(logits[0], asked[i])
        own = set(drawn[i::10])
        assert own <= allowed
        assert len(own) >= min(len(allowed), 25)


# ---------------------------------------------------------------------------------------------
# How often
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "vocabulary"),
    [
        ({}, 50),
        ({"temperature": 0.6}, 200),
        ({"top_p": 0.9}, 130),
        ({"top_k": 12}, 130),
        ({"min_p": 0.1}, 65),
        ({"top_k": 40, "top_p": 0.8, "temperature": 1.4}, 700),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(
    wishes: dict[str, float], vocabulary: int
) -> None:
    numbers = np.random.default_rng(5)
    logits = 1.5 * numbers.standard_normal(vocabulary)
    asked = Sampling(**wishes)  # type: ignore[arg-type]
    allowed = sorted(kept(logits, asked))
    weights = np.exp(logits[allowed] / asked.temperature)
    expected = weights / weights.sum()
    draws = 20_000
    rows = [SamplerState.of(replace(asked, seed=seed), ()) for seed in range(draws)]
    counts = Counter(draw(np.broadcast_to(logits, (draws, vocabulary)), rows))
    assert set(counts) <= set(allowed)
    assert chi_square_excess([counts[token] for token in allowed], expected * draws) < 4


def test_one_row_draws_over_time_what_the_probabilities_say() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    row = state(11)
    counts: Counter[int] = Counter()
    for drawn in range(4000):
        (token,) = draw(np.log(probabilities)[None], [row], drawn)
        counts[token] += 1
    assert chi_square_excess([counts[i] for i in range(5)], probabilities * 4000) < 4


def chi_square_excess(observed: list[int], expected: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean; rare tokens count as one."""
    seen = np.array(observed, float)
    rare = expected < 8
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(seen) - 1
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def test_the_deciding_numbers_are_uniform_in_the_half_open_unit_interval() -> None:
    asked = SamplingBatch([state(seed) for seed in range(300)])
    numbers = [float(n) for place in range(30) for n in asked.chances([place] * 300)]
    assert all(0 <= number < 1 for number in numbers)
    assert all((number * 2**23).is_integer() for number in numbers)
    tenths = Counter(int(10 * number) for number in numbers)
    assert chi_square_excess([tenths[i] for i in range(10)], np.full(10, 900.0)) < 4
    assert len(set(numbers)) > 0.99 * len(numbers)


def test_the_largest_deciding_number_stays_below_a_whole_in_single_precision() -> None:
    # 1 - 2^-23 is the largest there is; of any float32 sum it must be less than all.
    largest = np.float32(1 - 2**-23)
    for total in np.exp(np.linspace(-20, 20, 999)).astype(np.float32):
        assert largest * total < total


# ---------------------------------------------------------------------------------------------
# Distributions that are hard to get right
# ---------------------------------------------------------------------------------------------


class Decided(SamplingBatch):
    """What one row asks for whose deciding number is given."""

    def __init__(self, chance: float, **wishes: object) -> None:
        super().__init__([SamplerState(Sampling(**wishes))])  # type: ignore[arg-type]
        self.chance = chance

    def chances(self, drawn: Sequence[int]) -> NDArray[np.float32]:
        return np.full(1, self.chance, np.float32)


def draw_by(chance: float, logits: np.ndarray, **wishes: object) -> int:
    given = mx.array(logits.astype(np.float32))
    return sample(given, Decided(chance, **wishes), [0]).item()


EXTREMES = [0.0, 2**-23, 0.5, 1 - 2**-22, 1 - 2**-23]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("chance", EXTREMES)
def test_the_only_token_that_is_left_is_drawn(vocabulary: int, chance: float) -> None:
    places = {0, vocabulary // 2, vocabulary - 1, min(vocabulary - 1, BLOCK - 1)}
    for place in places:
        for other in (-np.inf, -200.0, -1e9):
            logits = np.full((1, vocabulary), other)
            logits[0, place] = 3.0
            assert draw_by(chance, logits) == place
            assert draw_by(chance, logits, top_p=0.9) == place


@pytest.mark.parametrize("chance", EXTREMES)
def test_excluded_tokens_are_never_drawn_at_the_extremes(chance: float) -> None:
    vocabulary = 3 * BLOCK + 11
    numbers = np.random.default_rng(2)
    for allowed in (
        [0],
        [vocabulary - 1],
        [BLOCK - 1, BLOCK],
        [5, 2 * BLOCK + 5],
        list(range(0, vocabulary, 7)),
    ):
        for spread in (0.0, 1.0, 30.0):
            logits = np.full((1, vocabulary), -np.inf)
            logits[0, allowed] = spread * numbers.standard_normal(len(allowed))
            assert draw_by(chance, logits) in allowed
            assert draw_by(chance, logits, top_k=3) in allowed
            assert draw_by(chance, logits, min_p=0.5, top_p=0.3) in allowed


def test_the_first_and_last_of_equal_tokens_are_drawn_at_the_extremes() -> None:
    for vocabulary in VOCABULARIES:
        logits = np.zeros((1, vocabulary))
        assert draw_by(0.0, logits) == 0
        assert draw_by(1 - 2**-23, logits) == vocabulary - 1
        assert draw_by(0.5, logits) in (vocabulary // 2, (vocabulary - 1) // 2)


@pytest.mark.parametrize("wishes", [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}], ids=str)
def test_a_vocabulary_of_a_quarter_million(wishes: dict[str, float]) -> None:
    vocabulary = 262_145
    numbers = np.random.default_rng(3)
    logits = numbers.standard_normal((3, vocabulary)) * np.array([[0.01], [2.0], [12.0]])
    rows = [state(seed, **wishes) for seed in range(3)]
    asked = Sampling(**wishes)  # type: ignore[arg-type]
    for row, token in zip(logits, draw(logits, rows), strict=True):
        rounded = row.astype(np.float32)
        assert token in kept(rounded, replace(asked, top_p=min(1.0, asked.top_p + 1e-4)))


def test_large_logits_neither_overflow_nor_hide_their_neighbours() -> None:
    logits = np.full((1, 100), -3e4)
    logits[0, [10, 20]] = 3e4
    drawn = {draw(logits, [state(seed, temperature=0.01)])[0] for seed in range(40)}
    assert drawn == {10, 20}


# ---------------------------------------------------------------------------------------------
# Greedy, penalties, bias
# ---------------------------------------------------------------------------------------------


def test_temperature_zero_is_the_best_token_whatever_the_filters_say() -> None:
    logits = np.random.default_rng(4).standard_normal((4, 333))
    rows = [
        state(1, temperature=0.0),
        state(2, temperature=0.0, top_p=0.1, top_k=3),
        state(3, temperature=0.0, min_p=0.9),
        state(4, temperature=1.0),
    ]
    assert draw(logits, rows)[:3] == logits.argmax(1)[:3].tolist()
    assert draw(logits[:3], rows[:3]) == logits.argmax(1)[:3].tolist()


def test_a_small_temperature_is_all_but_greedy() -> None:
    logits = np.random.default_rng(6).standard_normal((50, 200))
    rows = [state(seed, temperature=1e-4) for seed in range(50)]
    assert draw(logits, rows) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-39, 5e-324])
def test_a_temperature_beyond_the_range_of_logits_is_greedy(temperature: float) -> None:
    logits = 50 * np.random.default_rng(6).standard_normal((3, 200))
    rows = [
        state(1, temperature=temperature, top_p=0.9),
        state(2, temperature=temperature),
        state(3),
    ]
    assert draw(logits, rows)[:2] == logits.argmax(1)[:2].tolist()


def expected_penalised(logits: np.ndarray, row: SamplerState, output: list[int]) -> np.ndarray:
    """Token by token, as the formulas are written."""
    s, counts = row.sampling, Counter(output)
    adjusted = logits.astype(np.float64).copy()
    for token in range(len(logits)):
        if s.repetition_penalty != 1 and (token in row.prompt or counts[token]):
            penalty = s.repetition_penalty
            adjusted[token] = (
                adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
            )
        adjusted[token] -= s.frequency_penalty * counts[token]
        adjusted[token] -= s.presence_penalty * (counts[token] > 0)
        adjusted[token] += dict(s.logit_bias).get(token, 0.0)
        if token in row.banned:
            adjusted[token] = -np.inf
    return adjusted


@pytest.mark.parametrize("seed", range(12))
def test_penalties_and_biases_follow_their_formulas(seed: int) -> None:
    chance = random.Random(seed)
    vocabulary, rows, outputs = 60, [], []
    for i in range(6):
        prompt = tuple(chance.choices(range(vocabulary), k=10))
        row = state(
            i,
            prompt,
            temperature=0.0,
            repetition_penalty=chance.choice([1.0, 0.7, 1.8]),
            presence_penalty=chance.choice([0.0, 1.5, -1.0]),
            frequency_penalty=chance.choice([0.0, 0.6, -0.5]),
            logit_bias=tuple((t, chance.uniform(-3, 3)) for t in chance.sample(range(60), 4)),
        )
        output = chance.choices(range(vocabulary), k=chance.randrange(30))
        for token in output:
            row.advance(token)
        row.banned = tuple(chance.sample(range(vocabulary), i))
        rows.append(row)
        outputs.append(output)
    logits = np.random.default_rng(seed).standard_normal((6, vocabulary)) * 2
    logits[::2] -= 9
    wanted = [
        int(expected_penalised(own, row, output).argmax())
        for own, row, output in zip(logits, rows, outputs, strict=True)
    ]
    assert draw(logits, rows) == wanted


def test_a_penalised_distribution_is_drawn_from_as_its_formula_says() -> None:
    logits = np.linspace(1, -1, 20)
    output = [0, 0, 0, 1, 5]
    asked = Sampling(frequency_penalty=0.5, presence_penalty=0.3, logit_bias=((19, 2.0),))
    rows = []
    for seed in range(15_000):
        row = SamplerState.of(replace(asked, seed=seed), ())
        for token in output:
            row.advance(token)
        rows.append(row)
    weights = np.exp(expected_penalised(logits, rows[0], output))
    counts = Counter(draw(np.broadcast_to(logits, (15_000, 20)), rows))
    expected = weights / weights.sum() * 15_000
    assert chi_square_excess([counts[i] for i in range(20)], expected) < 4


def test_the_repetition_penalty_is_over_prompt_and_output_and_the_others_over_output() -> None:
    logits = np.zeros((1, 8))
    logits[0, 3] = 1.0
    logits[0, 4] = 0.9
    assert draw(logits, [state(0, (3,), temperature=0.0, repetition_penalty=2.0)]) == [4]
    assert draw(logits, [state(0, (3,), temperature=0.0, presence_penalty=2.0)]) == [3]
    row = state(0, (), temperature=0.0, repetition_penalty=2.0)
    row.advance(3)
    assert draw(logits, [row]) == [4]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 2.0])
def test_any_repetition_penalty_leaves_numbers_to_draw_by(temperature: float) -> None:
    logits = np.linspace(-90, 90, 100)[None]
    wishes = {"temperature": temperature, "seed": 0}
    for penalty in (1e-300, 1e-40, 1e-30):
        likelier = state(prompt=(7, 60, 63), repetition_penalty=penalty, **wishes)
        assert draw(logits, [likelier]) == [63]
    for penalty in (1e30, 1e39, 1e300):
        none_left = state(prompt=tuple(range(50)), repetition_penalty=penalty, **wishes)
        none_left.banned = tuple(range(50, 100))
        assert draw(logits, [none_left]) == [49]


def test_a_ban_outweighs_any_bias() -> None:
    row = state(0, temperature=0.0, logit_bias=((2, 100.0),))
    row.banned = (2,)
    assert draw(np.zeros((1, 5)), [row]) != [2]
    hot = state(0, logit_bias=((2, 100.0),))
    hot.banned = (2, 3, 4)
    for seed in range(50):
        hot.seed = seed
        assert draw(np.zeros((1, 5)), [hot])[0] in (0, 1)


def test_every_way_of_drawing_draws_what_there_is():
    logits = mx.array([[0.0, 3.0, 1.0, -2.0] * 40, [5.0, 1.0, 0.0, 2.0] * 40]).astype(mx.bfloat16)
    found = list(every_way(logits))
    mx.eval(found)
    assert all(len(array) > 0 for array in found)
    best = found[0].tolist()
    assert [logits[i, token].item() for i, token in enumerate(best)] == [3.0, 5.0]
