"""The model in PyTorch, for training: a SigLIP-like tower, Idefics3's connector, the demo's Llama.

Names and shapes of parameters are those of a checkpoint of transformers' Idefics3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from training.vision.shape import SCALE_FACTOR, SIDE, TOWER

ROWS = (SIDE // int(str(TOWER["patch_size"])) // SCALE_FACTOR) ** 2


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (
            p(x).view(b, n, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class EncoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.self_attn = VisionAttention(width, config["num_attention_heads"])
        self.layer_norm1 = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.mlp = VisionMLP(width, config["intermediate_size"])
        self.layer_norm2 = nn.LayerNorm(width, eps=config["layer_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, patch = config["hidden_size"], config["patch_size"]
        self.patch_embedding = nn.Conv2d(3, width, patch, patch)
        self.position_embedding = nn.Embedding((config["image_size"] // patch) ** 2, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed patches. A product in place of the convolution: the same, and quicker."""
        b, c, h, w = pixels.shape
        weight = self.patch_embedding.weight
        p = weight.shape[-1]
        patches = pixels.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        patches = patches.reshape(b, (h // p) * (w // p), c * p * p)
        x = F.linear(patches, weight.flatten(1), self.patch_embedding.bias)
        return x + self.position_embedding.weight


class Encoder(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config) for _ in range(config["num_hidden_layers"])
        )


class VisionModel(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class ModalityProjection(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden, bias=False)


class Connector(nn.Module):
    def __init__(self, config: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.modality_projection = ModalityProjection(
            config["hidden_size"] * SCALE_FACTOR**2, hidden
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shuffle pixels as Idefics3 does and project: (b, patches, width) to (b, rows, hidden)."""
        b, n, d = x.shape
        side, s = int(n**0.5), SCALE_FACTOR
        x = x.view(b, side, side // s, d * s).transpose(1, 2)
        x = x.reshape(b, side // s, side // s, d * s * s).transpose(1, 2)
        return self.modality_projection.proj(x.reshape(b, n // (s * s), d * s * s))


class Eyes(nn.Module):
    """Tower and connector: pixels (b, 3, 256, 256) in -1..1 to features (b, 64, hidden)."""

    def __init__(self, config: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.vision_model = VisionModel(config)
        self.connector = Connector(config, hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.vision_model.embeddings.position_embedding.weight, std=0.02)
        nn.init.normal_(self.vision_model.embeddings.patch_embedding.weight, std=0.03)
        nn.init.normal_(self.connector.modality_projection.proj.weight, std=0.003)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.connector(self.vision_model(pixels))


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.kv, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.kv, -1).transpose(1, 2)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        repeat = self.heads // self.kv
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Language(nn.Module):
    """The demo's Llama, from embeddings to logits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        half = config["head_dim"] // 2
        rates = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("rates", rates, persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the last hidden states (b, n, hidden), normed."""
        angles = (
            torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * self.rates
        )
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


def language(folder: Path) -> Language:
    """Load the language model of the demo's folder, its weights in float32."""
    config = json.loads((folder / "config.json").read_text())
    model = Language(config.get("text_config", config))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {
            name.removeprefix("model.").removeprefix("text_model."): weight.float()
            for name, weight in weights.items()
        }
    )
    return model
