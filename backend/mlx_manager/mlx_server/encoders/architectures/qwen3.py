"""Qwen 3, as it reads texts: a decoder that makes no tokens.

Source: transformers 5.24, `models/qwen3/modeling_qwen3.py`.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Body,
    Config,
    ScoreHead,
    Sizes,
    attend,
    split,
)
from mlx_manager.mlx_server.encoders.batch import CAUSAL, PaddedBatch

HEAD_SIZE, BASE = 128, 10_000.0


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, base: float) -> None:
        super().__init__()
        size, head = config.whole("hidden_size", 4096), config.whole("head_dim", HEAD_SIZE)
        self._heads = config.whole("num_attention_heads", 32)
        self._groups = config.whole("num_key_value_heads", self._heads)
        eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias", False)
        self.q_proj = nn.Linear(size, self._heads * head, bias=bias)
        self.k_proj = nn.Linear(size, self._groups * head, bias=bias)
        self.v_proj = nn.Linear(size, self._groups * head, bias=bias)
        self.o_proj = nn.Linear(self._heads * head, size, bias=bias)
        self.q_norm, self.k_norm = nn.RMSNorm(head, eps=eps), nn.RMSNorm(head, eps=eps)
        self._rope = nn.RoPE(head, base=base)
        self._scale = head**-0.5

    def __call__(self, x: mx.array) -> mx.array:
        q = self._rope(self.q_norm(split(self.q_proj(x), self._heads)))
        k = self._rope(self.k_norm(split(self.k_proj(x), self._groups)))
        v = split(self.v_proj(x), self._groups)
        mixed: mx.array = self.o_proj(attend(q, k, v, CAUSAL, self._scale))
        return mixed


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, base: float) -> None:
        super().__init__()
        size, inner = config.whole("hidden_size", 4096), config.whole("intermediate_size", 22016)
        eps = config.number("rms_norm_eps", 1e-6)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, base)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = {
            "gate_proj": nn.Linear(size, inner, bias=False),
            "up_proj": nn.Linear(size, inner, bias=False),
            "down_proj": nn.Linear(inner, size, bias=False),
        }
        self._act = config.activation("hidden_act", "silu")

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x))
        normed = self.post_attention_layernorm(x)
        inner = self._act(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        y: mx.array = x + self.mlp["down_proj"](inner)
        return y


class Qwen3(Body):
    """`Qwen3Model`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        size = self.sizes.hidden
        base = config.rotary_base(BASE)
        layers = config.whole("num_hidden_layers", 32)
        self.embed_tokens = nn.Embedding(self.sizes.vocabulary, size)
        self.layers = [Layer(config, base) for _ in range(layers)]
        self.norm = nn.RMSNorm(size, eps=config.number("rms_norm_eps", 1e-6))

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        x: mx.array = self.embed_tokens(batch.ids)
        for layer in self.layers:
            x = layer(x)
            made.append(x)
        normed: mx.array = self.norm(x)
        return normed


class LastTokenHead(ScoreHead):
    """`Qwen3ForSequenceClassification`'s head: a layer on the last token."""

    def __init__(self, config: Config, labels: int) -> None:
        super().__init__()
        self.score = nn.Linear(config.whole("hidden_size", 4096), labels, bias=False)

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        rows = mx.arange(hidden.shape[0])
        logits: mx.array = self.score(hidden[rows, batch.lengths - 1])
        return logits


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.check_code()
    config.must_be("use_sliding_window", False)
    config.must_be("is_causal", True)
    config.must_be("use_bidirectional_attention", False)
    config.activation("hidden_act", "silu")
    config.rotary_base(BASE)
    heads, head = config.whole("num_attention_heads", 32), config.whole("head_dim", HEAD_SIZE)
    return Sizes(
        vocabulary=config.whole("vocab_size", 151936),
        hidden=config.whole("hidden_size", 4096),
        widest=max(3 * heads * head, 2 * config.whole("intermediate_size", 22016)),
        heads=heads,
        head=head,
    )


ARCHITECTURE = Architecture(sizes_of, Qwen3, LastTokenHead, prefix="model.", unread=("lm_head.",))
