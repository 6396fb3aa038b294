"""Mistral, Mixtral, Ministral and Mistral's other models. Magistral thinks."""

from mlx_manager.mlx_server.models.family import Family, InfillTokens
from mlx_manager.mlx_server.models.module_facts import BlockNames, ModuleFacts

FAMILY = Family(
    "mistral",
    named=r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral",
    turn_ends=("</s>",),
    thinking=(("[THINK]", "[/THINK]"),),
    infill=(InfillTokens("[PREFIX]", "[SUFFIX]", None, suffix_first=True),),
    modules=ModuleFacts(
        # Mixtral's.
        blocks=(
            BlockNames(
                ("input_layernorm", None), ("post_attention_layernorm", None), "block_sparse_moe"
            ),
        ),
        scaled_queries=("ministral3.Attention",),
    ),
)
