"""GLM 4 to 5. GLM has no token for the end of a turn: it begins the next speaker's."""

from mlx_manager.mlx_server.models.families.deepseek import ONE_LAYER, SIGMOID_GATE
from mlx_manager.mlx_server.models.family import Family, MTPFacts
from mlx_manager.mlx_server.models.module_facts import BlockNames, ModuleFacts

FAMILY = Family(
    "glm",
    named=r"glm",
    turn_ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    mtp=(MTPFacts(("glm4_moe", "glm4_moe_lite"), layer=True, config=ONE_LAYER, blank_first=True),),
    modules=ModuleFacts(
        blocks=(
            BlockNames(
                ("input_layernorm", "post_self_attn_layernorm"),
                ("post_attention_layernorm", "post_mlp_layernorm"),
                "mlp",
            ),
        ),
        routings={"glm4_moe.MoEGate": SIGMOID_GATE, "glm4_moe_lite.MoEGate": SIGMOID_GATE},
    ),
)
