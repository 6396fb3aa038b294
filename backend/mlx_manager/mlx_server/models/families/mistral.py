"""Mistral, Mixtral, Ministral and Mistral's other models. Magistral thinks."""

from mlx_manager.mlx_server.models.family import Family, InfillTokens, VisionFacts
from mlx_manager.mlx_server.models.module_facts import BlockNames, ModuleFacts

TENSORS = (
    *("model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector."),
)
TOKENS = ("[IMG_BREAK]", "[IMG_END]")

FAMILY = Family(
    "mistral",
    named=r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral",
    turn_ends=("</s>",),
    thinking=(("[THINK]", "[/THINK]"),),
    infill=(InfillTokens("[PREFIX]", "[SUFFIX]", None, suffix_first=True),),
    vision=(
        VisionFacts(("mistral3",), "pixtral", TENSORS, "[IMG]", "[IMG]", TOKENS, "pixtral"),
        # transformers' checkpoints of Pixtral are llava's.
        VisionFacts(
            ("pixtral", "llava"),
            "pixtral",
            TENSORS,
            "[IMG]",
            "[IMG]",
            TOKENS,
            "pixtral",
            language=True,
        ),
    ),
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
