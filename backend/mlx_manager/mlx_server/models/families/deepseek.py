"""DeepSeek V1 to V4, R1, and models that are distilled from them."""

from mlx_manager.mlx_server.models.family import Family, InfillTokens, MTPFacts
from mlx_manager.mlx_server.models.module_facts import ModuleFacts, Routing, SharedNames

SOFTMAX_GATE = Routing(normalised=False, scale="routed_scaling_factor")
SIGMOID_GATE = Routing(
    "sigmoid",
    normalised="norm_topk_prob",
    alone=False,
    bias="e_score_correction_bias",
    scale="routed_scaling_factor",
)
"""The routers of V1 and 2, and of V3, which other families have as well."""

ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}
"""Settings of a model whose only layer has experts."""

FAMILY = Family(
    "deepseek",
    named=r"deepseek",
    turn_ends=("<｜end▁of▁sentence｜>",),
    infill=(InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),),
    # V3.2's function in place of a template fails at variables that it does not know, where a
    # template ignores them.
    function_variables=frozenset(
        {
            *("tools", "continue_final_message", "enable_thinking", "thinking_mode"),
            *("drop_thinking", "context", "add_default_bos_token"),
        }
    ),
    mtp=(MTPFacts(("deepseek_v3",), layer=True, config=ONE_LAYER, blank_first=True),),
    modules=ModuleFacts(
        shared_experts=(SharedNames("shared_experts"),),
        routings={
            "deepseek.MoEGate": SOFTMAX_GATE,
            "deepseek_v2.MoEGate": SOFTMAX_GATE,
            "deepseek_v3.MoEGate": SIGMOID_GATE,
        },
    ),
)
