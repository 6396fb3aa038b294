"""Phi-2 to 4, whose projections are joined from Phi-3 on."""

from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import AttentionNames, MLPNames, ModuleFacts

FAMILY = Family(
    "phi",
    named=r"\bphi|phi[-_]?\d|phimoe",
    turn_ends=("<|endoftext|>", "<|im_end|>", "<|end|>"),
    modules=ModuleFacts(
        attentions=(AttentionNames(("qkv_proj",)),), mlps=(MLPNames(("gate_up_proj",)),)
    ),
)
