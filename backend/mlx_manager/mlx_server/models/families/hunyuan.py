"""Hunyuan, which thinks and answers between tags on lines of their own.

Source: vLLM's hunyuan_a13b_reasoning_parser.py.
"""

from mlx_manager.mlx_server.models.family import Family, Tags

FAMILY = Family(
    "hunyuan",
    named=r"hunyuan",
    tags=Tags(("<think>", "</think>"), ("<answer>", "\n</answer>", "</answer>")),
)
