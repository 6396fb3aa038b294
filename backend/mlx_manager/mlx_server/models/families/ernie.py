"""ERNIE 4.5."""

from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import ModuleFacts, Routing

FAMILY = Family(
    "ernie",
    named=r"ernie",
    content=(("<response>", "\n</response>", "</response>"),),
    modules=ModuleFacts(
        routings={"ernie4_5_moe.Ernie4_5_MoeMLP": Routing("gate_act", chosen="k")},
    ),
)
