"""The kernel's text against the definition of what is drawn, on emulated GPUs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engine.test_sampling import chi_square_excess
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import ALL

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.devices.draws import checked, kernel
from mlx_manager.mlx_server.devices.draws.chances import chances, seed_of
from mlx_manager.mlx_server.devices.draws.check import CHANCES, DrawProblem, random_problem, row_of
from mlx_manager.mlx_server.devices.draws.kernel import LaunchForm
from mlx_manager.mlx_server.engine.sampling import SamplerState, SamplingBatch, sample_portably

BF16, F16, F32, U32 = mx.bfloat16, mx.float16, mx.float32, mx.uint32
DTYPES = (BF16, F16, F32)
SMALL = LaunchForm(64, 2)
NEVER = 2**32 - 1
WHOLE = {"cuda": kernel.ON_CUDA, "metal": kernel.ON_METAL}


class Emulated:
    """`DrawKernel` in one of the GPU languages, in small blocks unless said otherwise."""

    def __init__(self, language, compile_entries):
        made = {"cuda": kernel.cuda_source, "metal": kernel.metal_source}[language]
        self.whole = WHOLE[language]
        self._forms = [(dtype, SMALL) for dtype in DTYPES] + [(BF16, self.whole)]
        entries = [
            (made(dtype, form), (dtype, F32, U32, U32), (U32, U32)) for dtype, form in self._forms
        ]
        self._library = compile_entries(entries)

    def draw(self, logits, parameters, seeds, drawn, form=SMALL):
        rows, dtype = logits.shape[0], logits.dtype
        tokens, following = np.full(rows, NEVER, np.uint32), np.zeros(len(seeds), np.uint32)
        given = np.array(logits if dtype == F32 else logits.view(mx.uint16))
        self._library.call(
            self._forms.index((dtype, form)),
            [given, *map(np.array, (parameters, seeds, drawn))],
            [tokens, following],
            (rows * form.threads, 1, 1),
            (form.threads, 1, 1),
        )
        return mx.array(tokens), mx.array(following)

    def solve(self, problem: DrawProblem, dtype: mx.Dtype, form: LaunchForm = SMALL) -> np.ndarray:
        logits = mx.array(problem.logits).astype(dtype)
        given = map(mx.array, (problem.parameters, *problem.origins))
        return np.array(self.draw(logits, *given, form)[0])


@pytest.fixture(scope="module", params=["cuda", "metal"])
def emulated(request) -> Emulated:
    return Emulated(request.param, request.getfixturevalue(f"compile_{request.param}"))


def problem_of(rows, parameters, decided) -> DrawProblem:
    """Values that float32 has."""
    numbers = [np.array(each, np.float32) for each in (rows, parameters, decided)]
    return DrawProblem(*numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [40, 1003])
def test_every_row_draws_what_its_chance_says(emulated, dtype, vocabulary):
    problem = random_problem(vocabulary, dtype, CHANCES[1:])
    assert problem.mistake(emulated.solve(problem, dtype)) is None


def test_a_block_as_large_as_on_a_device_takes_several_turns(emulated):
    vocabulary = 4 * 256 * emulated.whole.threads // 32 + 296
    problem = random_problem(vocabulary, BF16, CHANCES[2:3])
    some = DrawProblem(problem.logits[::11], problem.parameters[::11], problem.chances[::11])
    assert some.mistake(emulated.solve(some, BF16, emulated.whole)) is None


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Logits of a row: spread, tied, equal, nearly all excluded, or huge."""
    vocabulary = draw(st.sampled_from([1, 2, 7, 8, 64, 513, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    logits = rng.normal(size=vocabulary) * draw(st.sampled_from([0.01, 1.0, 10.0, 1e4]))
    match draw(st.sampled_from(["spread", "tied", "equal", "few", "one"])):
        case "tied":
            logits = np.round(logits)
        case "equal":
            logits[:] = logits[0]
        case "few":
            logits[rng.random(vocabulary) < 0.8] = -np.inf
            logits[rng.integers(vocabulary)] = 1.0
        case "one":
            logits[:] = -np.inf
            logits[rng.integers(vocabulary)] = draw(st.sampled_from([-3e4, 0.0, 3e4]))
    return logits.astype(np.float32)


wanted = st.builds(
    row_of,
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 2.0]),
    greedy=st.sampled_from([False, False, False, True]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 999, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.3, 0.9, 0.999]),
)
chance = st.sampled_from([0.0, 2.0**-23, 1 - 2.0**-23]) | st.integers(0, 2**23 - 1).map(
    lambda n: n / 2**23
)


@settings(max_examples=150 if ALL else 75, deadline=None)
@given(row=rows(), asked=st.lists(st.tuples(wanted, chance), min_size=1, max_size=5))
def test_whatever_rows_ask_for_they_draw_by_the_definition(emulated, row, asked):
    parameters, decided = zip(*asked, strict=True)
    problem = problem_of([row] * len(asked), parameters, decided)
    assert problem.mistake(emulated.solve(problem, F32)) is None


@settings(max_examples=40, deadline=None)
@given(row=rows(), asked=st.lists(st.tuples(wanted, chance), min_size=2, max_size=6))
def test_a_row_draws_in_company_what_it_draws_alone(emulated, row, asked):
    parameters, decided = zip(*asked, strict=True)
    flipped = [row if i % 2 else -np.where(np.isinf(row), 0, row) for i in range(len(asked))]
    together = emulated.solve(problem_of(flipped, parameters, decided), F32)
    for i in range(len(asked)):
        alone = problem_of(flipped[i : i + 1], parameters[i : i + 1], decided[i : i + 1])
        assert emulated.solve(alone, F32)[0] == together[i]


@pytest.mark.parametrize(
    "asked", [row_of(), row_of(top_p=0.5), row_of(top_k=3), row_of(greedy=True)]
)
@pytest.mark.parametrize("filling", [-np.inf, np.inf, np.nan])
def test_rows_without_a_distribution_draw_some_token(emulated, asked, filling):
    problem = problem_of(np.full((1, 77), filling), [asked], [0.5])
    assert emulated.solve(problem, F32)[0] < 77


@pytest.mark.parametrize("asked", [row_of(top_k=3), row_of(top_p=0.7), row_of(top_k=3, top_p=0.9)])
def test_both_zeros_are_the_same_logit(emulated, asked):
    zeros = np.array([-0.0, 0.0, 0.0, -0.2, -0.2, -0.2, -0.2])
    problem = problem_of([zeros] * len(CHANCES), [asked] * len(CHANCES), CHANCES)
    assert problem.mistake(emulated.solve(problem, F32)) is None


def test_tokens_come_as_often_as_their_probability_says(emulated):
    logits = np.linspace(0, -4, 20).astype(np.float32)
    draws, seeds = 400, np.arange(400, dtype=np.uint64)
    asked = row_of(1.4, top_k=12, top_p=0.8)
    problem = problem_of([logits] * draws, [asked] * draws, chances(seeds, [0] * draws))
    counts = np.bincount(emulated.solve(problem, F32))
    weights = np.exp(logits[: len(counts)].astype(np.float64) / asked[0])
    assert len(counts) == 8
    assert chi_square_excess(counts.tolist(), weights / weights.sum() * draws) < 4


def test_steps_that_follow_one_another_draw_what_the_portable_way_draws(emulated):
    asked = SamplingBatch(
        [
            SamplerState.of(Sampling(seed=seed, temperature=0.9, **more), ())
            for seed, more in enumerate([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
        ]
    )
    rng = np.random.default_rng(1)
    # As they come: one after another, and again where a step was given up.
    for step in (0, 1, 2, 2, 3, 7, 8):
        drawn = [step, step + 5, 2 * step, step + 2**20]
        logits = mx.array(rng.normal(size=(4, 300)) * 3).astype(BF16)
        padded = mx.concatenate([logits, logits[:2]])
        tokens = asked.draw(emulated, padded, drawn).tolist()
        assert tokens == [*sample_portably(logits, asked, drawn).tolist(), 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 40, 1003, 9000])
def test_the_best_token_is_the_first_of_the_largest_logits(compile_cuda, dtype, vocabulary):
    library = compile_cuda([(kernel.best_source(of, SMALL), (of,), (U32,)) for of in DTYPES])
    problem = random_problem(vocabulary, dtype, CHANCES[:1])
    logits = mx.array(problem.logits).astype(dtype)
    tokens = np.full(len(problem.logits), NEVER, np.uint32)
    given = np.array(logits if dtype == F32 else logits.view(mx.uint16))
    threads = SMALL.threads
    grid = len(tokens) * threads, 1, 1
    library.call(DTYPES.index(dtype), [given], [tokens], grid, (threads, 1, 1))
    np.testing.assert_array_equal(tokens, problem.logits.argmax(axis=1))


def test_nvidia_s_compiler_takes_draws(nvidia_accepts):
    nvidia_accepts([(kernel.cuda_source(BF16), (BF16, F32, U32, U32), (U32, U32))])
    nvidia_accepts([(kernel.best_source(BF16), (BF16,), (U32,))])


@given(number=st.integers(0, 2**23 - 1))
def test_every_chance_has_a_seed(number):
    decided = number / 2**23
    assert chances(np.array([seed_of(decided)], np.uint64), [0])[0] == decided


@pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_passes_its_check(dtype):
    assert isinstance(checked(dtype), kernel.DrawKernel)
