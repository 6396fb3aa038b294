"""Qwen, QwQ, and Qwen 3.5 and Next, of whose layers some have the gated delta rule."""

from mlx_manager.mlx_server.models.family import (
    ConfigFacts,
    Family,
    InfillTokens,
    MTPFacts,
    VisionFacts,
)
from mlx_manager.mlx_server.models.module_facts import (
    AttentionNames,
    ModuleFacts,
    Routing,
    SharedNames,
)

TENSORS = ("model.visual.", "visual.", "vision_tower.", "model.language_model.visual.")
WORDS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|video_pad|>")
WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"

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
    vision=(
        VisionFacts(("qwen2_5_vl",), "qwen2_5_vl", TENSORS, "<|image_pad|>", WRITTEN, WORDS),
        VisionFacts(
            ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
            "qwen3_vl",
            TENSORS,
            "<|image_pad|>",
            WRITTEN,
            WORDS,
        ),
    ),
    mtp=(
        MTPFacts(
            ("qwen3_5", "qwen3_5_moe", "qwen3_next"),
            layer=False,
            config={"num_hidden_layers": 1, "full_attention_interval": 1, "layer_types": None},
            absent=("ssm_idx",),
            centred=True,
        ),
    ),
    modules=ModuleFacts(
        attentions=(AttentionNames(norms=("q_norm", "k_norm")),),
        experts=(("gate", "switch_mlp"),),
        shared_experts=(SharedNames("shared_expert", "shared_expert_gate"),),
        # The softmax is over all experts, which nothing in the block tells.
        routings={"qwen2_moe.Qwen2MoeSparseMoeBlock": Routing(normalised=False)},
        gated=("qwen3_next.Qwen3NextAttention",),
        deltas={
            "qwen3_5.GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            "qwen3_next.Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
        },
    ),
)
