"""Granite 3 and 4, and Granite's code models."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family, Tags

FAMILY = Family(
    "granite",
    named=r"granite",
    turn_ends=("<|end_of_text|>",),
    # Granite 3 thinks if the template's argument says so.
    tags=Tags(("<think>", "</think>"), ("<response>", "</response>"), asked_by="thinking"),
    config=ConfigFacts(
        layer_types={
            "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}
        }
    ),
)
