"""Cohere's Command R and A, and Aya."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family

FAMILY = Family(
    "cohere",
    named=r"cohere|c4ai|command-[ar]",
    thinking=(("<|START_THINKING|>", "<|END_THINKING|>"),),
    content=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"),),
    config=ConfigFacts(periods={"cohere2": "sliding_window_pattern"}),
)
