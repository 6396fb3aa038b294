"""EXAONE 3 and 4, and K-EXAONE, which has experts."""

from mlx_manager.mlx_server.models.families.deepseek import SIGMOID_GATE
from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

FAMILY = Family(
    "exaone",
    named=r"exaone",
    modules=ModuleFacts(routings={"exaone_moe.MoEGate": SIGMOID_GATE}),
)
