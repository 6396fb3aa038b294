"""LFM 2, of whose layers most have a gated short convolution."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family, VisionFacts
from mlx_manager.mlx_server.models.module_facts import (
    AttentionNames,
    BlockNames,
    MLPNames,
    ModuleFacts,
    Routing,
)

TILES = 10
"""Most lines, and columns, of a picture's tiles."""

FAMILY = Family(
    "lfm",
    named=r"\blfm",
    config=ConfigFacts(names={"lfm2": {"block_dim": "hidden_size"}}),
    vision=(
        VisionFacts(
            kinds=("lfm2-vl",),
            tower="lfm2_vl",
            tensors=(
                *("model.vision_tower.", "vision_tower."),
                *("model.multi_modal_projector.", "multi_modal_projector."),
            ),
            placeholder="<image>",
            written="<image>",
            tokens=(
                *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
                *(
                    f"<|img_row_{line}_col_{column}|>"
                    for line in range(1, TILES + 1)
                    for column in range(1, TILES + 1)
                ),
            ),
            language=True,
        ),
    ),
    modules=ModuleFacts(
        blocks=(BlockNames(("operator_norm", None), ("ffn_norm", None), "feed_forward"),),
        attentions=(AttentionNames(output="out_proj", norms=("q_layernorm", "k_layernorm")),),
        mlps=(MLPNames(("w1", "w3"), "w2"),),
        last_norms=("embedding_norm",),
        routings={
            "lfm2_moe.Lfm2MoeSparseMoeBlock": Routing(
                "sigmoid",
                normalised="norm_topk_prob",
                bias="expert_bias",
                scale="routed_scaling_factor",
                least=1e-6,
            )
        },
        short_convolutions=("lfm2.ShortConv", "lfm2_moe.ShortConv"),
    ),
)
