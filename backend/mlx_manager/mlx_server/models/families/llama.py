"""Llama 3 and its relatives, CodeLlama, and models that are fine-tuned from them."""

from mlx_manager.mlx_server.models.family import Family, InfillTokens
from mlx_manager.mlx_server.models.module_facts import (
    AttentionNames,
    BlockNames,
    MLPNames,
    ModuleFacts,
)

FAMILY = Family(
    "llama",
    named=r"llama",
    # Llama 3 ends a turn with <|eot_id|>, or <|eom_id|> before a tool's result. Its config.json
    # names at most one of these tokens, and a fine-tune's often neither. CodeLlama ends an infilled
    # text with ▁<EOT>.
    turn_ends=("▁<EOT>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    infill=(InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),),
    # Most other families' modules have the same names.
    modules=ModuleFacts(
        blocks=(BlockNames(("input_layernorm", None), ("post_attention_layernorm", None), "mlp"),),
        attentions=(AttentionNames(),),
        mlps=(MLPNames(),),
        last_norms=("norm",),
        heads=("n_heads", "num_heads"),
        kv_heads=("n_kv_heads", "num_kv_heads"),
        scales=("scale",),
    ),
)
