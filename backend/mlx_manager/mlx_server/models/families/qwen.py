"""Qwen, QwQ, and Qwen 3.5 and Next, of whose layers some have the gated delta rule."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family, InfillTokens
from mlx_manager.mlx_server.models.module_facts import AttentionNames, ModuleFacts, Routing

FAMILY = Family(
    "qwen",
    named=r"qwen|qwq",
    turn_ends=("<|endoftext|>", "<|im_end|>"),
    # CodeGemma has these, too.
    infill=(InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),),
    config=ConfigFacts(
        periods=dict.fromkeys(
            ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
            "full_attention_interval",
        ),
    ),
    modules=ModuleFacts(
        attentions=(AttentionNames(norms=("q_norm", "k_norm")),),
        experts=(("gate", "switch_mlp"),),
        # The softmax is over all experts, which nothing in the block tells.
        routings={"qwen2_moe.Qwen2MoeSparseMoeBlock": Routing(normalised=False)},
        gated=("qwen3_next.Qwen3NextAttention",),
        deltas={
            "qwen3_5.GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            "qwen3_next.Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
        },
    ),
)
