"""Steps of the common decoder with as few launches as it takes.

The common decoder is pre-norm with rotary attention and a gated MLP: Llama, Mistral, Qwen 2 and 3,
Phi-3 and their kin, which differ in data (biases, norms of q and k, tied heads, kinds of rotation,
windows). mlx-lm's modules spend some fifteen launches on each layer of it. Here a layer is eight:
norm, one product for q, k and v, attention (which normalises and rotates the heads, stores the new
token in its page and attends), output product with the residual added, norm, one product for gate
and up, activation, down product with the residual added. On an NVIDIA GPU and with few rows it is
five, since norms and activation become part of the products (see `products`), and with very few
it is two: attention, and all products from there to the next layer's. With chunks of prompts in a
step, attention is up to four launches: what it does first becomes one of its own, and rows and
chunks are attended by different kernels.

`FusedDecoder.build` makes it from a loaded module, whose weights become views of the joined ones,
so that nothing exists twice and the module goes on working. Whether the result is right is not
assumed from names but measured: `check` compares its logits with the module's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from mlx_manager.mlx_server.engine import products
from mlx_manager.mlx_server.engine.alike import arrays_of, kind_of, made_of
from mlx_manager.mlx_server.engine.evaluation import computed, one_by_one
from mlx_manager.mlx_server.engine.forward import RaggedStep, kept_in
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv import kernels as gpu
from mlx_manager.mlx_server.engine.kv.attention import StepPlan, attend, prepare
from mlx_manager.mlx_server.engine.kv.kernels import (
    AttentionShape,
    BlockKind,
    BuildKernels,
    PagedKernels,
    Rotary,
    Splits,
    opening,
)
from mlx_manager.mlx_server.engine.kv.kernels.kernel import Lengths
from mlx_manager.mlx_server.engine.kv.kernels.opening import BuildOpening, OpeningKernel, Turning
from mlx_manager.mlx_server.engine.kv.powers import gated_by, pays
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.engine.pieces import Pieces
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.chain import Chain
from mlx_manager.mlx_server.engine.products.factors import Link, Norm, Scaled
from mlx_manager.mlx_server.utils.steps import Steps, finish

BuildProducts = Callable[[mx.Dtype], ProductKernels | Unsupported]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Cuts = Sequence[tuple[int | None, bool, BlockKind]]
"""Of a step's splits, what is no array: the window of each, `divided` and `blocks`."""
Stepped = tuple[mx.array, mx.array]
"""A step's logits, and what is `before` the next."""

STEPS_BEFORE_COMPILING = 64
# Layers of a step with prompts that are queued at a time: the device begins while the host is still
# at the next ones. To queue is to give up Python's lock, and to wait for it again.
LAYERS_AT_A_TIME = 8
# What is queued keeps all that it works on, 147 kB a token and layer of an 8B. So layers that are
# queued together work on so many bytes, unless it is one, and all that are queued on so many,
# unless it is three pieces. One layer at a time takes 1 to 2 % of an 8B's prompts' rate, and spares
# half of what two keep (NOTES 102).
BYTES_AT_A_TIME = 500_000_000
BYTES_AHEAD = 1_300_000_000
LEAST_AHEAD = 3
# Of steps that are queued whole, how many are there at once (measured: 1.4 of an 8B's of 512
# tokens).
STEPS_AHEAD = 1.5
# Kinds of step that stay compiled; each keeps its launches' sources, some megabytes where they are
# not abbreviated.
MOST_COMPILED = 64


class NotFusable(Exception):
    """The module is no common decoder; the message says what is different."""


# ---------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, (rows, width), and what the product behind it takes of it."""

    rows: mx.array
    ahead: mx.array | Scaled

    @staticmethod
    def alone(rows: mx.array) -> Sum:
        return Sum(rows, rows)


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` is (outputs, inputs), `bias` (outputs,). `few` multiplies few rows, if it may.

    `transposed` is a view of `weight`: one that is made at each product is a microsecond of the
    host's.
    """

    weight: mx.array
    transposed: mx.array
    bias: mx.array | None
    few: ProductKernels | None

    def normed(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        """The product with `norm(x)`. x: `Scaled` if its maker did what is `expected`."""
        if self.few is not None and x.shape[0] <= self.few.most_rows:
            return self.few.multiply(x, self.weight, norm=_norm(norm), bias=self.bias)
        return self._product(norm(x))

    def gated(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        """`silu(gate) * up`, the halves of the product with `norm(x)`, as in `normed`."""
        if self.few is None:
            return _gate(self._product(norm(x)))
        if x.shape[0] > self.few.most_gated_rows:
            return self.few.gate(self._product(norm(x)))
        return self.few.gated(x, self.weight, norm=_norm(norm), bias=self.bias)

    def by_groups(self, rows: int) -> bool:
        """Whether `gated` multiplies so many by warpgroups."""
        return self.few is not None and self.few.gates_by_groups(self.weight, rows)

    def expected(self, norm: nn.RMSNorm) -> Norm | None:
        """`norm`, before this product, as who makes its few rows may do a part of it."""
        return None if self.few is None else _norm(norm)

    def added_to(self, residual: mx.array, x: mx.array, following: Norm | None) -> Sum:
        """`residual` plus the product with `x`. following: what the next product expects of it."""
        few, bias = self.few, self.bias
        if few is None or x.shape[0] > few.most_rows:
            out = mx.addmm(residual, x, self.transposed)
            return Sum.alone(out if bias is None else out + bias)
        if following is None:
            return Sum.alone(few.multiply(x, self.weight, bias=bias, residual=residual))
        return Sum(*few.multiply_ahead(x, self.weight, following, bias=bias, residual=residual))

    def link(self, norm: nn.RMSNorm | None = None) -> Link | None:
        """The product with `norm(x)`, or with `x`, as a part of a chain, if it may be one."""
        if self.few is None:
            return None
        return Link(self.weight, self.bias, None if norm is None else _norm(norm))

    def _product(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.transposed
        return mx.addmm(self.bias, x, self.transposed)


class OneProduct(ABC):
    """What is made of nothing but its product. For the methods, see `Dense`."""

    __slots__ = ()

    def normed(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        return self._product(norm(x))

    def gated(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        return _gate(self._product(norm(x)))

    def by_groups(self, rows: int) -> bool:
        return False

    def expected(self, norm: nn.RMSNorm) -> Norm | None:
        return None

    def added_to(self, residual: mx.array, x: mx.array, following: Norm | None) -> Sum:
        return Sum.alone(residual + self._product(x))

    def link(self, norm: nn.RMSNorm | None = None) -> Link | None:
        return None

    @abstractmethod
    def _product(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Quantized(OneProduct):
    """As `mx.quantized_matmul` takes them; `bias` is (outputs,)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None
    group_size: int
    bits: int
    mode: str

    def _product(self, x: mx.array) -> mx.array:
        out = mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            biases=self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class OfItsOwn(OneProduct):
    """A layer whose weight lies in memory in a way of its own, and which multiplies by itself."""

    layer: nn.Linear

    @property
    def weight(self) -> mx.array:
        weight: mx.array = self.layer.weight
        return weight

    @property
    def bias(self) -> mx.array | None:
        bias: mx.array | None = self.layer.get("bias")
        return bias

    def _product(self, x: mx.array) -> mx.array:
        out: mx.array = self.layer(x)
        return out


Projection = Dense | Quantized | OfItsOwn


def _norm(norm: nn.RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _gate(both: mx.array) -> mx.array:
    gate, up = mx.split(both, 2, axis=-1)
    if pays(both, gate.size):
        return gated_by(gate, up)
    gated: mx.array = swiglu(gate, up)
    return gated


def join(linears: Sequence[nn.Module], few: ProductKernels | None) -> Projection:
    """One product for several of the same input. Their weights become views of the joined ones,
    lazily: both are there until `Anatomy.weights` are evaluated."""
    first = linears[0]
    joined = dict(first)
    if len(linears) > 1:
        joined = {name: _below([linear[name] for linear in linears]) for name in joined}
        starts = dict.fromkeys(joined, 0)
        for linear in linears:
            stops = {name: start + linear[name].shape[0] for name, start in starts.items()}
            linear.update({name: joined[name][starts[name] : stops[name]] for name in joined})
            starts = stops
    if isinstance(first, nn.QuantizedLinear):
        return Quantized(
            joined["weight"],
            joined["scales"],
            joined.get("biases"),
            joined.get("bias"),
            first.group_size,
            first.bits,
            first.mode,
        )
    if type(first) is not nn.Linear:
        layer = copy(first)
        layer.update(joined)
        return OfItsOwn(layer)
    weight = joined["weight"]
    served = few is not None and few.serves(weight)
    return Dense(weight, weight.T, joined.get("bias"), few if served else None)


def _below(parts: Sequence[mx.array]) -> mx.array:
    """`parts`, one below the other; in memory by columns where the first of them is."""
    first = parts[0]
    if first.dtype == mx.float32 and first.ndim == 2:
        rows, columns = np.array(first, copy=False).strides
        if rows < columns:
            return mx.concatenate([part.T for part in parts], axis=1).T
    return mx.concatenate(list(parts))


# ---------------------------------------------------------------------------------------------
# Reading the module
# ---------------------------------------------------------------------------------------------

_ROPES = (nn.RoPE, Llama3RoPE, YarnRoPE, SuScaledRoPE, ProportionalRoPE)
_ATTENTIONS = (
    {"q_proj", "k_proj", "v_proj", "o_proj", "rope"},
    {"q_proj", "k_proj", "v_proj", "o_proj", "rope", "q_norm", "k_norm"},
    {"qkv_proj", "o_proj", "rope"},
)
_GIVEN = {"self", "x", "mask", "cache"}
_MLPS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_BODY = {"embed_tokens", "layers", "norm"}


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One layer of the module, before anything is joined."""

    qkv: tuple[nn.Module, ...]
    output: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    head_norms: tuple[nn.RMSNorm, nn.RMSNorm] | None
    rope: nn.Module
    rotary: Rotary
    shape: AttentionShape
    scale: float
    window: int | None

    @staticmethod
    def of(block: nn.Module, window: int | None, page_size: int) -> Anatomy:
        _expect(_parts(block) == _BLOCK, "a block of other parts")
        attention, mlp = block.self_attn, block.mlp
        _expect(_parts(attention) in _ATTENTIONS, "attention of other parts")
        # What else it is given may depend on the position, and differ only far into a text.
        given = signature(type(attention).__call__).parameters.keys()
        _expect(given <= _GIVEN, f"attention that takes {', '.join(sorted(given - _GIVEN))}")
        _expect(_parts(mlp) in _MLPS, "an MLP of other parts")
        _expect(isinstance(attention.rope, _ROPES), f"{type(attention.rope).__name__}")
        qkv = _linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        norms = (block.input_layernorm, block.post_attention_layernorm)
        head_norms = None
        if "q_norm" in attention:
            head_norms = (attention.q_norm, attention.k_norm)
        _expect(
            all(type(norm) is nn.RMSNorm for norm in (*norms, *(head_norms or ()))),
            "norms of another kind",
        )
        heads, kv_heads = attention.n_heads, attention.n_kv_heads
        rows = sum(linear.weight.shape[0] for linear in qkv)
        dim = rows // (heads + 2 * kv_heads)
        if head_norms is not None:
            sizes = {norm.weight.size for norm in head_norms}
            epsilons = {norm.eps for norm in head_norms}
            _expect(sizes == {dim} and len(epsilons) == 1, "norms over all heads at once")
        dims = (
            attention.rope.dim
            if isinstance(attention.rope, SuScaledRoPE)
            else (attention.rope.dims)
        )
        traditional = not isinstance(attention.rope, SuScaledRoPE) and attention.rope.traditional
        _expect(traditional or dims % 16 == 0, f"rotation of {dims} elements")
        return Anatomy(
            qkv=qkv,
            output=_linears(attention, ("o_proj",), "o_proj")[0],
            gate_up=_linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
            down=_linears(mlp, ("down_proj",), "down_proj")[0],
            norms=norms,
            head_norms=head_norms,
            rope=attention.rope,
            rotary=Rotary(dims, traditional, head_norms[0].eps if head_norms else None),
            shape=AttentionShape(heads, kv_heads, dim, page_size, norms[0].weight.dtype),
            scale=attention.scale,
            window=window,
        )

    @property
    def head_weights(self) -> tuple[mx.array, mx.array] | None:
        """Of the norms of q and k."""
        return self.head_norms and (self.head_norms[0].weight, self.head_norms[1].weight)

    def weights(self) -> list[mx.array]:
        """Of the projections."""
        projections = (*self.qkv, self.output, *self.gate_up, self.down)
        return [array for projection in projections for array in projection.parameters().values()]


def _parts(module: nn.Module) -> set[str]:
    """Names of the modules, and of the lists of modules, that `module` is made of."""
    return {
        name
        for name, part in module.items()
        if isinstance(part[0] if isinstance(part, list) and part else part, nn.Module)
    }


def _linears(parent: nn.Module, apart: tuple[str, ...], together: str) -> tuple[nn.Module, ...]:
    names = (together,) if together in parent else apart
    linears = tuple(parent[name] for name in names)
    kinds = {
        (type(x), *((x.group_size, x.bits, x.mode) if type(x) is nn.QuantizedLinear else ()))
        for x in linears
    }
    known = all(isinstance(x, nn.Linear) or type(x) is nn.QuantizedLinear for x in linears)
    _expect(known and len(kinds) == 1, "projections of other kinds, or of several")
    _expect(len({frozenset(dict(x)) for x in linears}) == 1, "a bias on some projections only")
    return linears


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise NotFusable(what)


def _windows(model: nn.Module) -> list[int | None]:
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        match cache:
            case KVCache():
                windows.append(None)
            case RotatingKVCache(keep=0):
                windows.append(cache.max_size)
            case _:
                raise NotFusable(f"a cache of type {type(cache).__name__}")
    return windows


# ---------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step, of one token a row.

    tokens: (rows,) uint32, the newest of each row. before: (rows,) int32, tokens of each row before
    that one; 0 for padding, whose logits mean nothing. table: (rows, max_pages) int32; every newest
    token has its page already. pools: each layer's keys and values, written in place, (kv_heads,
    slots, head_dim). splits: from `FusedDecoder.plan`.
    """

    tokens: mx.array
    before: mx.array
    table: mx.array
    pools: Sequence[tuple[mx.array, mx.array]]
    splits: Mapping[int | None, Splits]


@dataclass(frozen=True, slots=True)
class Rotation:
    """One kind of rotation of the model: cosines and sines for `PagedKernels.attend_fused`.

    frequencies: (dims / 2,) float32 radians a position. amplitude: what it multiplies pairs by.

    They are computed here, since MLX's own kernel gives wrong rows on CUDA for arrays that are not
    contiguous (mlx-lm pull request 1896), and single-token batches have been wrong before (mlx
    issues 3494, 3949).
    """

    frequencies: mx.array
    amplitude: float
    traditional: bool
    # Of each number of a rotation: the frequency that it comes from, and whether it is a cosine.
    _turns: mx.array
    _cosine: mx.array

    @staticmethod
    def of(rope: nn.Module, rotary: Rotary) -> Rotation:
        match rope:
            case nn.RoPE():
                turns = np.arange(0, rotary.dims, 2) / rotary.dims
                frequencies, amplitude = rope.base**-turns * rope.scale, 1.0
            case SuScaledRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope._scale
            case YarnRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope.mscale
            case _:
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), 1.0
        places = np.arange(rotary.dims)
        half = rotary.dims // 2
        pair, cosine = places % half, places < half
        if rotary.traditional:
            pair, cosine = places // 2, places % 2 == 0
        turns = frequencies.astype(np.float32)
        # The result of an operation lies in the device's memory, an array from the host in memory
        # that the device has to fetch at each use.
        arrays = [
            mx.array(turns) * 1,
            mx.array(turns[pair]) * 1,
            mx.logical_not(mx.array(~cosine)),
        ]
        mx.eval(arrays)
        rotation = Rotation(arrays[0], amplitude, rotary.traditional, *arrays[1:])
        rotation._expect_as_of(rope)
        return rotation

    def __call__(self, positions: mx.array) -> mx.array:
        """(rows, dims) float32 for positions (rows,): the rotation of pairs (1, 0).

        One kernel when it is compiled, since each number is made by itself.
        """
        angles = positions[:, None].astype(mx.float32) * self._turns
        rotation = mx.where(self._cosine, mx.cos(angles), mx.sin(angles))
        return rotation if self.amplitude == 1.0 else rotation * self.amplitude

    def _expect_as_of(self, rope: nn.Module) -> None:
        """Raise unless the module's own rotation of one row agrees."""
        basis = self._cosine.astype(mx.float32)[None, None, None]
        for position in (0, 1, 777):
            theirs = np.array(rope(basis, offset=position))[0, 0, 0]
            ours = np.array(self(mx.array([position])))[0]
            _expect(bool(np.abs(theirs - ours).max() < 2e-3), "a rotation that turns otherwise")


@dataclass(frozen=True, slots=True)
class Block:
    """The products of one layer, joined."""

    norm: nn.RMSNorm
    qkv: Projection
    output: Projection
    mlp_norm: nn.RMSNorm
    gate_up: Projection
    down: Projection

    @staticmethod
    def of(
        anatomy: Anatomy,
        few: ProductKernels | None = None,
        norm: Callable[[nn.RMSNorm], nn.RMSNorm] = lambda own: own,
    ) -> Block:
        """Its weights are joined, and those of the module become views of them: see `join`.

        few: what multiplies few rows, if anything does. norm: what stands for the layer's norms.
        """
        return Block(
            norm=norm(anatomy.norms[0]),
            qkv=join(anatomy.qkv, few),
            output=join([anatomy.output], few),
            mlp_norm=norm(anatomy.norms[1]),
            gate_up=join(anatomy.gate_up, few),
            down=join([anatomy.down], few),
        )

    def heads(self, hidden: mx.array | Scaled) -> mx.array:
        """What attention works on, (tokens, (heads + 2 * kv_heads) * dim): q, k and v."""
        return self.qkv.normed(hidden, self.norm)

    def expects(self, rows: int) -> tuple[Norm | None, Norm | None]:
        """What who makes so many rows for `qkv` and `gate_up` is to do of their norms."""
        if not self.gate_up.by_groups(rows):
            return None, None
        return self.qkv.expected(self.norm), self.gate_up.expected(self.mlp_norm)

    def after(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """The layer's result. attended: (tokens, heads * dim)."""
        return self.launches_after(hidden, attended, None)[-1].rows

    def launches_after(
        self, hidden: mx.array, attended: mx.array, following: Norm | None
    ) -> tuple[mx.array, mx.array, Sum]:
        """The layer's result, after what it is made from. following: what the next one expects."""
        _, expected = self.expects(hidden.shape[0])
        added = self.output.added_to(hidden, attended, expected)
        gated = self.gate_up.gated(added.ahead, self.mlp_norm)
        return added.rows, gated, self.down.added_to(added.rows, gated, following)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers whose products are by the same kernels."""
        return kind_of(self)


@dataclass(frozen=True, slots=True)
class Joined:
    """What a joint gives: all that it launches, the layer's result, (rows, width), and the heads of
    the layer that follows, (rows, (heads + 2 * kv_heads) * dim)."""

    launches: Sequence[mx.array]
    result: mx.array
    heads: mx.array | None


@dataclass(frozen=True, slots=True)
class Joint:
    """What lies between a layer's attention and that of the layer that follows, if one does.

    chain: does it in one launch for few rows, if anything does.
    """

    block: Block
    following: Block | None
    chain: Chain | None

    @staticmethod
    def of(block: Block, following: Block | None, few: ProductKernels | None) -> Joint:
        """few: what multiplies few rows, if anything does."""
        links = [block.output.link(), block.gate_up.link(block.mlp_norm), block.down.link()]
        if following is not None:
            links.append(following.qkv.link(following.norm))
        found = [link for link in links if link is not None]
        if few is None or len(found) < len(links):
            return Joint(block, following, None)
        return Joint(block, following, few.chain(found))

    def __call__(self, hidden: mx.array, attended: mx.array) -> Joined:
        """attended: (rows, heads * dim)."""
        if self.chain is not None and hidden.shape[0] <= self.chain.most_rows:
            chained = self.chain(attended, hidden)
            return Joined(chained, chained[2], None if self.following is None else chained[3])
        following = self.following
        expected = None if following is None else following.expects(hidden.shape[0])[0]
        *made, result = self.block.launches_after(hidden, attended, expected)
        made.append(result.rows)
        if following is None:
            return Joined(made, result.rows, None)
        heads = following.heads(result.ahead)
        return Joined([*made, heads], result.rows, heads)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for joints whose launches are by the same kernels."""
        following = self.following
        if self.chain is None and (
            following is None or not any(following.expects(ProductKernels.most_rows))
        ):
            return self.block.kind
        return (self.block.kind, None if following is None else following.kind)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the layers of a step share, and what is `before` the next, (rows,) int32.

    lengths: (rows or more,) int32, tokens of each row, the newest included; 0 for padding.
    rotations: of the newest, by kind.
    """

    following: mx.array
    lengths: mx.array
    rotations: Sequence[mx.array]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a decode step begins with. `kernel`: does it in one launch, if anything does."""

    embed: nn.Module
    rotations: Sequence[Rotation]
    kernel: OpeningKernel | None

    @staticmethod
    def of(common: Common, build: BuildOpening) -> Opening:
        embed, rotations = common.embed, common.rotations
        dtype = common.layers[0].shape.dtype
        if type(embed) is not nn.Embedding or embed.weight.dtype != dtype:
            return Opening(embed, rotations, None)
        kinds = [
            Turning(2 * turn.frequencies.size, turn.traditional, turn.amplitude)
            for turn in rotations
        ]
        kernel = build(dtype, embed.weight.shape[1], kinds)
        return Opening(embed, rotations, None if isinstance(kernel, Unsupported) else kernel)

    def __call__(self, tokens: mx.array, before: mx.array) -> tuple[mx.array, Shared]:
        """Embeddings, (rows, width), and what layers share."""
        if self.kernel is not None:
            frequencies = [turn.frequencies for turn in self.rotations]
            hidden, following = self.kernel.open(tokens, before, self.embed.weight, frequencies)
            return hidden, Shared(following, self.kernel.lengths, self.kernel.rotations)
        # Padding stays at 0: it must not write anywhere.
        lengths = mx.where(before > 0, before + 1, 0)
        turns = [turn(before) for turn in self.rotations]
        return self.embed(tokens), Shared(lengths, lengths, turns)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a step needs of one layer. `rotation` numbers the decoder's kinds of rotation."""

    joint: Joint
    head_norms: tuple[mx.array, mx.array] | None
    rotation: int
    rotary: Rotary
    kernels: PagedKernels
    scale: float
    window: int | None

    @property
    def block(self) -> Block:
        return self.joint.block

    @property
    def token_bytes(self) -> int:
        """Of all that is made of a token on the way through: queries rotated and what they attend
        to, and what the products make and are made from."""
        shape, block = self.kernels.shape, self.block
        made = [linear.weight.shape[-2] for linear in (block.output, block.down)]
        made += [block.qkv.weight.shape[-2], 2 * shape.q_heads * shape.head_dim]
        gates = block.gate_up.weight.shape[-2]
        norms = made[:2]
        return shape.dtype.size * sum([*made, *norms, gates, gates // 2])

    def attend(
        self, heads: mx.array, shared: Shared, pool: tuple[mx.array, mx.array], step: Step
    ) -> mx.array:
        """(rows, heads * dim). heads: the layer's own, (rows, (heads + 2 * kv_heads) * dim)."""
        return self.kernels.attend_fused(
            heads,
            shared.rotations[self.rotation],
            self.head_norms,
            *pool,
            step.table,
            shared.lengths,
            rotary=self.rotary,
            scale=self.scale,
            splits=step.splits[self.window],
            window=self.window,
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers whose launches are of the same kernels."""
        return (self.kernels.shape, self.window, self.scale, self.rotary, *self.joint.kind)

    @property
    def ragged(self) -> RaggedLayer:
        return RaggedLayer(
            self.block, self.head_norms, self.rotary, self.kernels, self.scale, self.window
        )


@dataclass(frozen=True, slots=True)
class RaggedLayer:
    """What a step with prompts in it needs of one layer: a part as `alike` knows them."""

    block: Block
    head_norms: tuple[mx.array, mx.array] | None
    rotary: Rotary
    kernels: PagedKernels
    scale: float
    window: int | None

    def __call__(
        self, hidden: mx.array, rotation: mx.array, store: LayerStore, plan: StepPlan
    ) -> mx.array:
        """The layer's result. hidden: (tokens, width)."""
        queries = self.kernels.rotate_and_write(
            self.block.heads(hidden),
            rotation,
            self.head_norms,
            store.keys,
            store.values,
            plan.numbers.array,
            rotary=self.rotary,
        )
        attended = attend(queries, store, plan, self.scale, self.window)
        return self.block.after(hidden, attended.reshape(hidden.shape[0], -1))


@dataclass(frozen=True, slots=True)
class Repeated:
    """A layer, with all that tells it from others of its `kind`, a number: `arrays` and the number
    of its `rotation`."""

    layer: RaggedLayer
    kind: int
    arrays: Sequence[mx.array]
    rotation: int

    @staticmethod
    def all_of(layers: Sequence[Layer]) -> list[Repeated]:
        parts = [layer.ragged for layer in layers]
        numbers: dict[tuple[Any, ...], int] = {}
        kinds = [numbers.setdefault(kind_of(part), len(numbers)) for part in parts]
        return [
            Repeated(part, kind, arrays_of(part), layer.rotation)
            for part, kind, layer in zip(parts, kinds, layers, strict=True)
        ]

    def run(  # noqa: PLR0917
        self,
        store: LayerStore,
        plan: StepPlan,
        hidden: mx.array,
        rotation: mx.array,
        arrays: Sequence[mx.array],
        pages: Sequence[mx.array],
    ) -> tuple[mx.array, mx.array]:
        """The result of any layer of this kind, and what is `written` then.

        arrays, pages: that layer's, and its store's.
        """
        own = store.alike(pages)
        result = made_of(self.layer, arrays)(hidden, rotation, own, plan)
        return result, own.written


class FusedDecoder:
    """Steps of one model; made by `build`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        open: Opening,
        head: Callable[[mx.array], mx.array],
        compile: Compile,
    ) -> None:
        self._layers = layers
        self._repeated = Repeated.all_of(layers)
        self._open = open
        self._head = head
        self._planners = {layer.window: layer.kernels for layer in layers}
        # What a layer makes of a token.
        self._layer_bytes = max(layer.token_bytes for layer in layers)
        self._compile = compile
        self._compiled: dict[tuple[Any, ...], Callable[..., Stepped]] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()

    @staticmethod
    def build(  # noqa: PLR0917
        model: nn.Module,
        page_size: int,
        kernels: BuildKernels = gpu.build,
        products: BuildProducts = products.build,
        compile: Compile = mx.compile,
        openings: BuildOpening = opening.build,
    ) -> FusedDecoder | Unsupported:
        """`building` in one go."""
        return finish(FusedDecoder.building(model, page_size, kernels, products, compile, openings))

    @staticmethod
    def building(  # noqa: PLR0917
        model: nn.Module,
        page_size: int,
        kernels: BuildKernels = gpu.build,
        products: BuildProducts = products.build,
        compile: Compile = mx.compile,
        openings: BuildOpening = opening.build,
    ) -> Steps[FusedDecoder | Unsupported]:
        """The fused form of `model`, an mlx-lm module on the MLX thread, or why there is none.

        From here on the module's projections of q, k and v, and of gate and up, share memory with
        the joined ones, a layer at a time. Nothing has been compared yet: see `checking`.
        """
        try:
            return (yield from _building(model, page_size, kernels, products, compile, openings))
        except NotFusable as reason:
            return Unsupported(f"the module is no common decoder: {reason}")

    def plan(self, lengths: Lengths) -> dict[int | None, Splits]:
        """Cut a step's attention; `lengths` are those of the step. Good for the steps
        that follow, too, as long as the same rows go on (see `Splits`)."""
        return {
            window: kernels.plan(lengths, window=window)
            for window, kernels in self._planners.items()
        }

    def run(self, step: Step) -> Stepped:
        """Logits (rows, vocabulary) of one step, and what is `before` the next; not evaluated.

        A kind of step (rows, width of the table, length of the work lists) that keeps coming is
        compiled, which halves the host's share and holds everybody up once. Of more kinds than are
        kept that which did not come for longest goes, and counts anew: where rows are of every
        length there are hundreds.
        """
        kind = (
            step.table.shape,
            *((cut.work, cut.divided, cut.blocks) for cut in step.splits.values()),
        )
        run = self._compiled.pop(kind, None)
        if run is None:
            run = partial(self._run, _cuts(step))
            self._seen[kind] += 1
            if self._seen[kind] <= STEPS_BEFORE_COMPILING:
                return run(*_arrays(step))
            del self._seen[kind]
            if len(self._compiled) == MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            run = self._compile(run)
        self._compiled[kind] = run
        return run(*_arrays(step))

    def launches(self, step: Step) -> list[mx.array]:
        """What `run` launches, in that order and not evaluated, in one layer of each kind.

        The first launch of a kernel compiles it, and MLX keeps it on disk. Writes to the pages what
        `run` writes there, or would with other layers before.
        """
        return self._all_launches(_cuts(step), *_arrays(step))

    def launches_compiled(self, step: Step) -> list[mx.array]:
        """As `launches`, but of a compiled step; all kinds of steps share their kernels."""
        compiled = self._compile(partial(self._all_launches, _cuts(step)))
        found: list[mx.array] = compiled(*_arrays(step))
        return found

    def prepare(self, plan: StepPlan, stores: Sequence[LayerStore]) -> None:
        """Send what `run_ragged` takes of `plan`. What it sends by itself sets out alone."""
        _ = plan.numbers.array
        done = set()
        for layer, store in zip(self._layers, stores, strict=True):
            kind = (layer.kernels.shape, layer.window)
            if kind not in done:
                done.add(kind)
                prepare(layer.kernels.shape.q_heads, store, plan, layer.window)

    def run_ragged(self, step: RaggedStep, stores: Sequence[LayerStore]) -> tuple[mx.array, Pieces]:
        """Logits (wanted tokens, vocabulary) of one step, with chunks of prompts in it or not, and
        the pieces that are to be queued before them. Of a silent step (1, hidden size).

        `stores` are the layers' pages, written in place. A layer is put together once for each kind
        there is, and repeated: that takes the host half as long as all of them by themselves
        (NOTES 104).
        """
        rotations = [rotation(step.plan.positions) for rotation in self._open.rotations]
        hidden = self._open.embed(step.tokens)
        at_a_time, pieces_ahead = self._ahead(step.tokens.size)
        pieces = Pieces(pieces_ahead)
        compiled: dict[int, Callable[..., tuple[mx.array, mx.array]]] = {}
        for number, (layer, store) in enumerate(zip(self._repeated, stores, strict=True), 1):
            if layer.kind not in compiled:
                compiled[layer.kind] = self._compile(partial(layer.run, store, step.plan))
            run, rotation = compiled[layer.kind], rotations[layer.rotation]
            hidden, store.written = run(hidden, rotation, layer.arrays, store.arrays)
            if number % at_a_time == 0:
                pieces.add(hidden)
        last = hidden if step.wanted is None else hidden[step.wanted]
        return last if step.silent else self._head(last), pieces

    def tokens_at_once(self, tokens: int) -> int:
        """See `Forward`: a step's first pieces are queued while the end of the last one runs."""
        whole = min(tokens, int(BYTES_AHEAD / (self._layer_bytes * len(self._layers))))
        at_a_time, pieces = self._ahead(tokens)
        part = STEPS_AHEAD if pieces is None else at_a_time * pieces / len(self._layers)
        return int(max(STEPS_AHEAD * whole, min(part, STEPS_AHEAD) * tokens))

    def _ahead(self, tokens: int) -> tuple[int, int | None]:
        """How many layers of a step of so many tokens are queued at a time, and how many such
        pieces at most; None: all."""
        layer = tokens * self._layer_bytes
        if layer * len(self._layers) <= BYTES_AHEAD:
            return LAYERS_AT_A_TIME, None
        at_a_time = max(1, min(LAYERS_AT_A_TIME, int(BYTES_AT_A_TIME / layer)))
        return at_a_time, max(LEAST_AHEAD, int(BYTES_AHEAD / (at_a_time * layer)))

    def _run(  # noqa: PLR0917
        self,
        cuts: Cuts,
        tokens: mx.array,
        before: mx.array,
        table: mx.array,
        pools: Sequence[tuple[mx.array, mx.array]],
        items: Sequence[mx.array],
    ) -> Stepped:
        step = _step(cuts, tokens, before, table, pools, items)
        hidden, shared = self._open(tokens, before)
        heads: mx.array | None = None
        for layer, pool in zip(self._layers, pools, strict=True):
            own = layer.block.heads(hidden) if heads is None else heads
            joined = layer.joint(hidden, layer.attend(own, shared, pool, step))
            hidden, heads = joined.result, joined.heads
        return self._head(hidden), shared.following

    def _all_launches(self, cuts: Cuts, *arrays: Any) -> list[mx.array]:
        step = _step(cuts, *arrays)
        hidden, shared = self._open(step.tokens, step.before)
        found = [shared.following, *shared.rotations, hidden]
        kinds = set()
        for layer, pool in zip(self._layers, step.pools, strict=True):
            if layer.kind not in kinds:
                kinds.add(layer.kind)
                heads = layer.block.heads(hidden)
                attended = layer.attend(heads, shared, pool, step)
                joined = layer.joint(hidden, attended)
                found += [heads, attended, *joined.launches]
                hidden = joined.result
        return [*found, self._head(hidden)]


def _cuts(step: Step) -> Cuts:
    return [(window, cut.divided, cut.blocks) for window, cut in step.splits.items()]


def _arrays(step: Step) -> tuple[Any, ...]:
    items = [cut.items for cut in step.splits.values()]
    return step.tokens, step.before, step.table, step.pools, items


def _step(  # noqa: PLR0917
    cuts: Cuts,
    tokens: mx.array,
    before: mx.array,
    table: mx.array,
    pools: Sequence[tuple[mx.array, mx.array]],
    items: Sequence[mx.array],
) -> Step:
    splits = {
        window: Splits(array, divided, blocks)
        for (window, divided, blocks), array in zip(cuts, items, strict=True)
    }
    return Step(tokens, before, table, pools, splits)


@dataclass(frozen=True, slots=True)
class Common:
    """A common decoder, before anything is joined.

    rotations: its kinds of rotation. kinds: the number of each layer's among them.
    """

    layers: list[Anatomy]
    rotations: list[Rotation]
    kinds: list[int]
    embed: nn.Module
    norm: nn.RMSNorm
    vocabulary: Callable[[mx.array], mx.array]

    @staticmethod
    def of(model: nn.Module, page_size: int) -> Common:
        """
        Raises:
            NotFusable: `model` is something else.
        """
        _expect("model" in model and _parts(model) <= {"model", "lm_head"}, "a head")
        body = model.model
        _expect(_parts(body) == _BODY and type(body.norm) is nn.RMSNorm, "a body of other parts")
        windows = _windows(model)
        _expect(len(windows) == len(body.layers), "layers without a cache, or with several")
        layers = [
            Anatomy.of(block, window, page_size)
            for block, window in zip(body.layers, windows, strict=True)
        ]
        ropes = [_kind(layer.rope) for layer in layers]
        firsts = list(dict.fromkeys(ropes))
        of_kind = [layers[ropes.index(kind)] for kind in firsts]
        tied = "lm_head" not in model
        return Common(
            layers,
            [Rotation.of(layer.rope, layer.rotary) for layer in of_kind],
            [firsts.index(kind) for kind in ropes],
            body.embed_tokens,
            body.norm,
            body.embed_tokens.as_linear if tied else model.lm_head,
        )


def attention_shapes(model: nn.Module, page_size: int) -> set[AttentionShape]:
    """Of a common decoder's layers; none of another model's."""
    try:
        return {anatomy.shape for anatomy in Common.of(model, page_size).layers}
    except NotFusable:
        return set()


def _building(  # noqa: PLR0917
    model: nn.Module,
    page_size: int,
    kernels: BuildKernels,
    products: BuildProducts,
    compile: Compile,
    openings: BuildOpening,
) -> Steps[FusedDecoder]:
    common = Common.of(model, page_size)
    served = {}
    for shape in {anatomy.shape for anatomy in common.layers}:
        built = kernels(shape)
        if isinstance(built, Unsupported):
            raise NotFusable(built.reason)
        served[shape] = built
    multiplier = products(common.layers[0].shape.dtype)
    few = None if isinstance(multiplier, Unsupported) else multiplier
    blocks = []
    for anatomy in common.layers:
        blocks.append(Block.of(anatomy, few))
        # Before the next layer is joined, so that one alone is there twice.
        yield from computed(anatomy.weights())
    joints = [Joint.of(*pair, few) for pair in zip(blocks, [*blocks[1:], None], strict=True)]
    layers = [
        Layer(
            joint=joint,
            head_norms=anatomy.head_weights,
            rotation=kind,
            rotary=anatomy.rotary,
            kernels=served[anatomy.shape],
            scale=anatomy.scale,
            window=anatomy.window,
        )
        for anatomy, kind, joint in zip(common.layers, common.kinds, joints, strict=True)
    ]
    return FusedDecoder(
        layers,
        Opening.of(common, openings),
        lambda hidden: common.vocabulary(common.norm(hidden)),
        compile,
    )


def _kind(rope: nn.Module) -> tuple[Any, ...]:
    """Equal for rotations that turn alike."""
    numbers = {name: bytes(np.array(array)) for name, array in dict(rope).items()}
    constants = {name: value for name, value in vars(rope).items() if not name.startswith("_no")}
    return (type(rope), repr(sorted(constants.items())), repr(sorted(numbers.items())))


# ---------------------------------------------------------------------------------------------
# Is it right?
# ---------------------------------------------------------------------------------------------


# Numbers of rows that differ in how they are computed: as they are, and padded.
_CHECKED_ROWS = (3, 12, 20, 40, 68)


def check(decoder: FusedDecoder, model: nn.Module, page_size: int) -> str | None:
    """`checking` in one go."""
    return finish(checking(decoder, model, page_size))


def checking(decoder: FusedDecoder, model: nn.Module, page_size: int) -> Steps[str | None]:
    """Compare steps of two rows and padding with `model`'s own logits; None if right.

    Pauses after each pass through the model, and before that after each kind of launch, whose
    kernel may have to be compiled.

    Half precision rounds differently in products of different shapes, and depth multiplies it: so
    the yardstick is by how much the module differs from itself, between a step and a prompt.
    """
    lengths = (2 * page_size + 5, 3)
    longest = max(lengths) + 2
    texts = [[3 + (7 * i + 13 * j) % 50 for j in range(longest)] for i in range(len(lengths))]
    caches, prompts = [], []
    for text, n in zip(texts, lengths, strict=True):
        cache = make_prompt_cache(model)
        # Both steps' tokens as a prompt's, and of one length: cuDNN prepares itself for each that
        # is new, 40 ms.
        prompts.append((yield from _passed(model, text, cache)))
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, longest - n)
        else:
            cache = make_prompt_cache(model)
            yield from _passed(model, text[:n], cache)
        caches.append(cache)
    counts = [-(-(n + 2) // page_size) for n in lengths]
    pages = np.split(np.arange(sum(counts), dtype=np.int32)[::-1], [counts[0]])
    pools = _filled(caches, pages, page_size)
    yield from computed([array for pool in pools for array in pool])
    worst, noise = 0.0, 0.0
    for i in range(2):
        tokens = [text[n + i] for text, n in zip(texts, lengths, strict=True)]
        seen = [n + i + 1 for n in lengths]
        own = []
        for token, cache, prompt, n in zip(tokens, caches, prompts, seen, strict=True):
            logits = yield from _passed(model, [token], cache)
            own.append(logits[-1])
            noise = max(noise, _distance(prompt[n - 1], logits[-1]))
        for rows in _CHECKED_ROWS:
            step = _Sample(tokens, seen, pages, pools).padded(decoder, rows)
            if i == 0:
                yield from one_by_one(decoder.launches(step))
            out, _ = decoder.run(step)
            yield from computed([out])
            for logits, mine in zip(own, out, strict=False):
                worst = max(worst, _distance(mine, logits))
    allowed = max(2e-3, 3 * noise)
    if worst <= allowed:
        return None
    return (
        f"its logits differ from the module's by {worst:.2g}, and the module's from its own by "
        f"{noise:.2g} (relative; allowed {allowed:.2g})"
    )


def _passed(model: nn.Module, tokens: list[int], cache: list[Any]) -> Steps[mx.array]:
    """(tokens, vocabulary) logits, computed."""
    logits: mx.array = model(mx.array([tokens]), cache=cache)[0]
    yield from computed([*kept_in(cache), logits])
    return logits


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows whose pages and pools are filled up to their newest tokens."""

    tokens: Sequence[int]
    lengths: Sequence[int]
    pages: Sequence[np.ndarray[Any, Any]]
    pools: Sequence[tuple[mx.array, mx.array]]

    def padded(self, decoder: FusedDecoder, rows: int) -> Step:
        padding = [0] * (rows - len(self.tokens))
        seen = np.array([*self.lengths, *padding], np.int32)
        table = np.zeros((rows, max(len(own) for own in self.pages)), np.int32)
        for row, own in enumerate(self.pages):
            table[row, : len(own)] = own
        return Step(
            tokens=mx.array([*self.tokens, *padding], mx.uint32),
            before=mx.array(np.maximum(seen - 1, 0)),
            table=mx.array(table),
            pools=self.pools,
            splits=decoder.plan(seen),
        )


def _filled(
    caches: Sequence[Sequence[Any]], pages: Sequence[np.ndarray[Any, Any]], page_size: int
) -> list[tuple[mx.array, mx.array]]:
    """Each layer's pools with the content of each row's caches in its pages; not evaluated."""
    slots = sum(len(own) for own in pages) * page_size
    pools = []
    for layer in zip(*caches, strict=True):
        pair = []
        for which in (0, 1):
            first = layer[0].state[which]
            pool = mx.zeros((first.shape[1], slots, first.shape[3]), first.dtype)
            for own, cache in zip(pages, layer, strict=True):
                content = cache.state[which][0, :, : cache.offset]
                places = np.arange(content.shape[1])
                pool[:, mx.array(own[places // page_size] * page_size + places % page_size)] = (
                    content
                )
            pair.append(pool)
        pools.append((pair[0], pair[1]))
    return pools


def _distance(a: mx.array, b: mx.array) -> float:
    wide = b.astype(mx.float32)
    ratio = mx.linalg.norm(a.astype(mx.float32) - wide) / mx.linalg.norm(wide)
    off = float(np.array(ratio))
    return float("inf") if np.isnan(off) else off
