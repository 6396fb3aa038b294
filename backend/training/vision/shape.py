"""The tower's shape, as config.json has it."""

from __future__ import annotations

SIDE = 256
SCALE_FACTOR = 2
TOWER = {
    "model_type": "idefics3_vision",
    "hidden_size": 192,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_channels": 3,
    "image_size": SIDE,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
