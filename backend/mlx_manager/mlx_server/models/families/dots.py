"""dots.llm1."""

from mlx_manager.mlx_server.models.families.deepseek import SIGMOID_GATE
from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

FAMILY = Family(
    "dots",
    named=r"\bdots\.?(?:llm)?1",
    modules=ModuleFacts(
        experts=(("gate", "experts"),), routings={"dots1.Dots1TopkRouter": SIGMOID_GATE}
    ),
)
