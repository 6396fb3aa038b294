"""Gemma 1 to 4. Gemma 4 ends its turns with `<turn|>`, older ones with `<end_of_turn>`."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family, VisionFacts
from mlx_manager.mlx_server.models.module_facts import (
    AttentionNames,
    BlockNames,
    ModuleFacts,
    Routing,
)

HEAD_NORMS = ("q_norm", "k_norm")

FAMILY = Family(
    "gemma",
    named=r"gemma",
    turn_ends=("<turn|>", "<end_of_turn>"),
    config=ConfigFacts(
        periods={"gemma3_text": "sliding_window_pattern"},
        rope_by_layer=("gemma4_text",),
        # By a linear factor.
        extended=("gemma3",),
    ),
    vision=(
        VisionFacts(
            kinds=("gemma3",),
            tower="gemma3",
            tensors=(
                *("model.vision_tower.", "vision_tower."),
                *("model.multi_modal_projector.", "multi_modal_projector."),
            ),
            placeholder="<start_of_image>",
            written="<start_of_image>",
            tokens=("<image_soft_token>", "<end_of_image>"),
        ),
        VisionFacts(
            kinds=("gemma4",),
            tower="gemma4",
            tensors=(
                *("model.vision_tower.", "vision_tower."),
                *("model.embed_vision.", "embed_vision."),
            ),
            placeholder="<|image|>",
            written="<|image|>",
            tokens=("<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        ),
    ),
    modules=ModuleFacts(
        blocks=(
            BlockNames(
                ("input_layernorm", "post_attention_layernorm"),
                ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
                "mlp",
            ),
        ),
        # Gemma 4: values are normed; in some layers they are the keys; the last layers attend to
        # earlier ones' keys and values.
        attentions=(
            AttentionNames(norms=HEAD_NORMS, value_norm="v_norm"),
            AttentionNames(("q_proj", "k_proj"), norms=HEAD_NORMS, value_norm="v_norm"),
            AttentionNames(("q_proj",), norms=("q_norm",)),
        ),
        offset_norms=("gemma2.RMSNorm", "gemma3_text.RMSNorm"),
        bare_norms=("gemma4_text.RMSNormNoScale",),
        gelu=("gemma2.MLP", "gemma3_text.MLP", "gemma4_text.MLP", "gemma4_text.GeGLU"),
        clipped=("gemma3_text.TransformerBlock",),
        sharing=("gemma4_text.Attention",),
        scaled_layers=("gemma4_text.DecoderLayer",),
        routings={
            "gemma4_text.Router": Routing(
                chosen="config.top_k_experts",
                expert_scale="per_expert_scale",
                linear="proj",
                norm=lambda router: router.scale * router._root_size,
            )
        },
        beside=("gemma4_text.Experts",),
        # Gemma 3's is rounded to bfloat16, whatever the type of the embeddings.
        embedding_scales={
            "gemma2.GemmaModel": "own",
            "gemma3_text.Gemma3Model": "bfloat16",
            "gemma4_text.Gemma4TextModel": "own",
        },
        kv_sources={"gemma4_text.Gemma4TextModel": "previous_kvs"},
        per_layer_inputs=("gemma4_text.Gemma4TextModel",),
    ),
)
