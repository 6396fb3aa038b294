"""StarCoder, whose tokens for infilling Granite's code models have, too; and SantaCoder."""

from mlx_manager.mlx_server.models.family import Family, InfillTokens

FAMILY = Family(
    "starcoder",
    named=r"starcoder|santacoder",
    infill=(
        InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ),
)
