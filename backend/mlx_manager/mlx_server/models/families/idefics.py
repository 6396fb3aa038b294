"""Idefics 3 and SmolVLM: a Llama model behind a SigLIP encoder whose patches are shuffled."""

from mlx_manager.mlx_server.models.family import Family, VisionFacts

ROWS, COLUMNS = 6, 6
"""Most tiles of a picture that have tokens of their own, by height and width."""

FAMILY = Family(
    "idefics",
    named=r"idefics|smolvlm",
    turn_ends=("<end_of_utterance>",),
    vision=(
        VisionFacts(
            kinds=("idefics3", "smolvlm"),
            tower="idefics3",
            tensors=("model.vision_model.", "vision_model.", "model.connector.", "connector."),
            placeholder="<image>",
            written="<image>",
            tokens=(
                *("<fake_token_around_image>", "<global-img>"),
                *(
                    f"<row_{row}_col_{column}>"
                    for row in range(1, ROWS + 1)
                    for column in range(1, COLUMNS + 1)
                ),
            ),
            language=True,
        ),
    ),
)
