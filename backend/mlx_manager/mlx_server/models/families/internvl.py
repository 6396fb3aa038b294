"""InternVL 3: a Qwen model behind a vision transformer whose patches are shuffled."""

from mlx_manager.mlx_server.models.family import Family, VisionFacts

FAMILY = Family(
    "internvl",
    named=r"internvl",
    turn_ends=("<|im_end|>",),
    vision=(
        VisionFacts(
            kinds=("internvl", "internvl_chat"),
            tower="internvl",
            tensors=(
                *("model.vision_tower.", "vision_tower.", "vision_model.", "mlp1."),
                *("model.multi_modal_projector.", "multi_modal_projector."),
            ),
            placeholder="<IMG_CONTEXT>",
            written="<IMG_CONTEXT>\n",
            tokens=("<img>", "</img>"),
            language=True,
        ),
    ),
)
