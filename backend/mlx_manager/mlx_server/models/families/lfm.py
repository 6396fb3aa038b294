"""LFM 2, of whose layers most have a gated short convolution."""

from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import (
    AttentionNames,
    BlockNames,
    MLPNames,
    ModuleFacts,
    Routing,
)

FAMILY = Family(
    "lfm",
    named=r"\blfm",
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
