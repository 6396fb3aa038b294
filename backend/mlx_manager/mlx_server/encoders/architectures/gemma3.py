"""Gemma 3's text model, as it reads texts: EmbeddingGemma sees a text in both directions.

Source: transformers 5.24, `models/gemma3/modeling_gemma3.py`.
"""

from __future__ import annotations

import math

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Body,
    Config,
    Sizes,
    attend,
    split,
)
from mlx_manager.mlx_server.encoders.batch import CAUSAL, Mask, PaddedBatch

HEAD_SIZE, GLOBAL, LOCAL = 256, 1_000_000.0, 10_000.0


class Norm(nn.Module):  # type: ignore[misc]
    """`Gemma3RMSNorm`, whose weights are the difference from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros(size)
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + self.weight, self._eps)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, base: float) -> None:
        super().__init__()
        size, head = config.whole("hidden_size", 2304), config.whole("head_dim", HEAD_SIZE)
        self._heads = config.whole("num_attention_heads", 8)
        self._groups = config.whole("num_key_value_heads", 4)
        eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias", False)
        self.q_proj = nn.Linear(size, self._heads * head, bias=bias)
        self.k_proj = nn.Linear(size, self._groups * head, bias=bias)
        self.v_proj = nn.Linear(size, self._groups * head, bias=bias)
        self.o_proj = nn.Linear(self._heads * head, size, bias=bias)
        self.q_norm, self.k_norm = Norm(head, eps), Norm(head, eps)
        self._rope = nn.RoPE(head, base=base)
        self._scale = config.number("query_pre_attn_scalar", 256) ** -0.5

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        q = self._rope(self.q_norm(split(self.q_proj(x), self._heads)))
        k = self._rope(self.k_norm(split(self.k_proj(x), self._groups)))
        v = split(self.v_proj(x), self._groups)
        mixed: mx.array = self.o_proj(attend(q, k, v, mask, self._scale))
        return mixed


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, base: float) -> None:
        super().__init__()
        size, inner = config.whole("hidden_size", 2304), config.whole("intermediate_size", 9216)
        eps = config.number("rms_norm_eps", 1e-6)
        self.self_attn = Attention(config, base)
        self.mlp = {
            "gate_proj": nn.Linear(size, inner, bias=False),
            "up_proj": nn.Linear(size, inner, bias=False),
            "down_proj": nn.Linear(inner, size, bias=False),
        }
        self.input_layernorm = Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.pre_feedforward_layernorm = Norm(size, eps)
        self.post_feedforward_layernorm = Norm(size, eps)
        self._act = config.activation("hidden_activation", "gelu_pytorch_tanh")

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask))
        normed = self.pre_feedforward_layernorm(x)
        inner = self._act(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        y: mx.array = x + self.post_feedforward_layernorm(self.mlp["down_proj"](inner))
        return y


class Gemma3(Body):
    """`Gemma3TextModel`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        size = self.sizes.hidden
        self._near = windows_of(config)
        self._back = not config.flag("use_bidirectional_attention", False)
        window = config.whole("sliding_window", 4096)
        # In both directions the window is divided into halves.
        self._reach = window - 1 if self._back else window // 2
        everywhere, near = bases_of(config)
        self.embed_tokens = nn.Embedding(self.sizes.vocabulary, size)
        self.layers = [Layer(config, near if is_near else everywhere) for is_near in self._near]
        self.norm = Norm(size, config.number("rms_norm_eps", 1e-6))

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        x: mx.array = self.embed_tokens(batch.ids)
        x = x * mx.array(math.sqrt(self.sizes.hidden), x.dtype)
        everywhere: Mask = CAUSAL if self._back else batch.to_all()
        near = batch.to_near(self._reach, back=self._back)
        for layer, is_near in zip(self.layers, self._near, strict=True):
            x = layer(x, near if is_near else everywhere)
            made.append(x)
        normed: mx.array = self.norm(x)
        return normed


def windows_of(config: Config) -> list[bool]:
    """Return for each layer whether it sees what is near only."""
    every = config.whole("sliding_window_pattern", 6)
    layers = config.whole("num_hidden_layers", 26)
    return config.layer_types(layers, lambda index: (index + 1) % every != 0)


def bases_of(config: Config) -> tuple[float, float]:
    """Return RoPE's bases, of the layers that see all and of those that see what is near."""
    return (
        config.rotary_base(GLOBAL, "full_attention"),
        config.rotary_base(LOCAL, "sliding_attention", "rope_local_base_freq"),
    )


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.check_code()
    config.must_be("attn_logit_softcapping", None)
    config.activation("hidden_activation", "gelu_pytorch_tanh")
    windows_of(config)
    bases_of(config)
    heads, head = config.whole("num_attention_heads", 8), config.whole("head_dim", HEAD_SIZE)
    return Sizes(
        vocabulary=config.whole("vocab_size", 262_208),
        hidden=config.whole("hidden_size", 2304),
        widest=max(3 * heads * head, 2 * config.whole("intermediate_size", 9216)),
        heads=heads,
        head=head,
    )


ARCHITECTURE = Architecture(
    sizes_of, Gemma3, None, prefix="model.", unread=("lm_head.",), wide=True
)
