"""Latent vectors made into keys and values of heads against plain arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import BF16, DEVICE, F16
from devices.cuda.mla.test_latent import Emulated
from devices.portable import PortableChunks, turning

from mlx_manager.mlx_server.devices.attention.check import TOLERANCE, difference, numbers
from mlx_manager.mlx_server.devices.attention.kinds import build_expansion
from mlx_manager.mlx_server.devices.cuda.attention import chunks
from mlx_manager.mlx_server.devices.cuda.attention.chunk_tiles import GroupTiles
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels
from mlx_manager.mlx_server.devices.cuda.mla import expansion, latent
from mlx_manager.mlx_server.devices.cuda.mla.check import check_expansion
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion, QueryTokens
from mlx_manager.mlx_server.devices.cuda.mla.latent import TurningKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Unsupported

GLM = LatentShape(20, 512, 64, 192, 768, 32, BF16, 256)
DEEPSEEK = LatentShape(128, 512, 64, 128, 1536, 16, BF16, 128)
SMALL = LatentShape(2, 64, 16, 16, 64, 16, BF16, 32)
# Values that are wider than keys, and both narrower than what kernels serve.
WIDE = LatentShape(3, 64, 16, 8, 72, 32, F16, 40)


def portable(of: LatentShape) -> Expansion:
    return Expansion(of, PortableChunks(of.expanded), turning(of))


@pytest.fixture
def emulated(compile_cuda, monkeypatch) -> None:
    for module in (chunks, latent):
        monkeypatch.setattr(module, "CudaKernel", lambda text, **_: Emulated(compile_cuda, text))


@pytest.mark.usefixtures("emulated")
def test_kernels_for_chunks_attend_to_what_is_expanded():
    kernels = ChunkKernels(SMALL.expanded, DEVICE, GroupTiles(1, 32))
    turn = TurningKernels(SMALL, kernels.shape.head_dim)
    assert check_expansion(Expansion(SMALL, kernels, turn), traditional=True) is None


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("of", [GLM, WIDE], ids=["as wide as keys", "wider"])
@pytest.mark.usefixtures("emulated")
def test_queries_are_turned_as_the_definition_has_it(of, traditional):
    rng, tokens = np.random.default_rng(0), 5
    drawn = rng.normal(size=(tokens, of.q_heads * (of.plain + of.dims)))
    queries = mx.array(drawn).astype(of.dtype)
    rotation = mx.array(rng.normal(size=(tokens, of.dims)), mx.float32)
    width = of.expanded.head_dim
    found = TurningKernels(of, width)(queries, rotation, traditional=traditional)
    wanted = turning(of)(queries, rotation, traditional=traditional)
    assert found.shape == (tokens, of.q_heads, 1, width)
    assert difference(numbers(found), numbers(wanted)) < TOLERANCE
    plain, empty = numbers(found)[..., : of.plain], numbers(found)[..., of.plain + of.dims :]
    assert (plain == numbers(wanted)[..., : of.plain]).all()
    assert not empty.any()


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("of", [SMALL, WIDE], ids=["keys", "values"])
def test_keys_and_values_may_be_of_any_sizes(of, traditional):
    assert check_expansion(portable(of), traditional=traditional) is None


def test_heads_are_as_wide_as_keys_and_values_need():
    assert [of.expanded.head_dim for of in (GLM, DEEPSEEK, WIDE)] == [256, 192, 48]


class _Noisy(PortableChunks):
    def attend(self, *args, **how):
        return super().attend(*args, **how) * 1.05


class _Padded(PortableChunks):
    def plan(self, runs, window=None):
        return super().plan(runs[:-1])


@pytest.mark.parametrize(
    ("kind", "wrong"), [(_Noisy, "expanded latents differ"), (_Padded, "padding become no numbers")]
)
def test_the_check_sees_what_is_wrong(kind, wrong):
    made = Expansion(SMALL, kind(SMALL.expanded), turning(SMALL))
    found = check_expansion(made, traditional=True)
    assert wrong in found


def first_of(of: LatentShape, texts: list[tuple[int, int]]) -> int:
    """texts: queries after tokens."""
    queries, before = np.array(texts, np.int64).T
    return portable(of).first_of(queries, queries + before)


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        # Whole prompts, and the rest of one; running rows before them.
        ([(4096, 0)], 0),
        ([(2048, 8192)], 0),
        ([(1, 500)] * 3 + [(2048, 0), (2048, 0)], 3),
        # Many prompts, each too short by itself.
        ([(256, 0)], 1),
        ([(256, 0)] * 16, 16),
        ([(512, 0)] * 16, 0),
        # Few queries far into a text, by themselves and before others.
        ([(64, 20_000)], 1),
        ([(64, 9_000), (2048, 0)], 1),
        ([(2048, 2048), (17, 100)], 0),
        # More than there is room for, of one and of several.
        ([(2048, 30_000)], 1),
        ([(2048, 25_000), (2048, 8_000)], 1),
        ([(1, 100)], 1),
    ],
)
def test_what_saves_most_is_expanded(texts, first):
    assert first_of(GLM, texts) == first


def test_no_more_is_expanded_than_there_is_room_for(monkeypatch):
    most = portable(GLM).most_tokens
    assert 25_000 < most < 32_768
    assert first_of(GLM, [(2048, most - 2048)]) == 0
    assert first_of(GLM, [(2048, most - 2047)]) == 1
    for of in (GLM, DEEPSEEK):
        assert 0.95 * expansion.MOST_BYTES < portable(of).most_bytes <= expansion.MOST_BYTES
    monkeypatch.setattr(expansion, "MOST_BYTES", 1000)
    assert portable(GLM).most_tokens == 0
    assert first_of(GLM, [(4096, 0)]) == 1


def test_pages_that_texts_share_are_expanded_once():
    pages = np.array([[7, 3, 9, 4], [7, 3, 5, 0], [1, 8, 0, 0]], np.int32)
    lengths, queries = (125, 90, 33), (20, 30, 33)
    texts = [QueryTokens(*own) for own in zip(queries, lengths, pages, strict=True)]
    found = portable(GLM).plan(texts, padding=50)
    read, table = np.array(found.pages), np.array(found.table)
    assert len(read) == expansion.GRAIN // GLM.page_size
    assert sorted(set(read.tolist())) == [1, 3, 4, 5, 7, 8, 9]
    for own, row, length in zip(pages, table, lengths, strict=True):
        count = -(-length // GLM.page_size)
        assert (read[row[:count]] == own[:count]).all()
    runs = np.array(found.plan.items).tolist()
    assert runs == [[0, 20, 0, 106], [20, 30, 1, 61], [50, 33, 2, 1], [83, 50, 0, 1]]


def test_padding_sees_no_more_than_there_is():
    found = portable(GLM).plan([QueryTokens(20, 20, np.array([2], np.int32))], padding=50)
    runs = np.array(found.plan.items).tolist()
    assert runs == [[0, 20, 0, 1], [20, 20, 0, 1], [40, 20, 0, 1], [60, 10, 0, 1]]


def test_heads_that_no_kernel_attends_to_are_the_reason():
    wide = LatentShape(2, 64, 64, 256, 640, 16, BF16, 128)
    found = build_expansion(wide, traditional=True)
    assert isinstance(found, Unsupported)
    assert "heads of 320" in found.reason


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there is a GPU")
def test_without_a_gpu_nothing_is_expanded():
    assert isinstance(build_expansion(GLM, traditional=True), Unsupported)
