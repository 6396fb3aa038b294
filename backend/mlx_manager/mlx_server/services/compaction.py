"""A conversation that has become long is summed up first, and answered from the summary."""

from __future__ import annotations

from collections.abc import Callable

from mlx_manager.mlx_server.core import GenerationRequest, TokenizerInfo
from mlx_manager.mlx_server.engine.stream import Steps
from mlx_manager.mlx_server.errors import ContextLengthExceeded
from mlx_manager.mlx_server.services.inference import EverShorter, Inference


async def context_length(inference: Inference, model: str) -> int:
    """Return how many tokens a model can take. It is loaded for that.

    Raises:
        MLXManagerError: as `Inference.ask`.
    """
    info: TokenizerInfo = await inference.ask(
        model, lambda model, caller: model.tokenizer_info(caller=caller), "text"
    )
    return info.context_length


async def is_longer(inference: Inference, asked: GenerationRequest, threshold: int) -> bool:
    """Return whether a prompt has as many tokens as `threshold`, or more than the model can take.

    Raises:
        MLXManagerError: as `Inference.ask`.
    """
    try:
        found = await inference.ask(
            asked.model, lambda model, caller: model.tokenize(asked.prompt, caller=caller)
        )
    except ContextLengthExceeded:
        return True
    return len(found.ids) >= threshold


async def compacting(
    inference: Inference,
    summaries: EverShorter,
    rest: Callable[[], EverShorter],
    steps: Steps,
) -> None:
    """Generate a summary, and then what is answered with it in place.

    summaries: requests for it. rest: asked for once the reader of the steps has the whole summary.

    Raises:
        MLXManagerError: as `Generation.run`.
    """
    await inference.generate_fitting(summaries).run(steps)
    await steps.taken()
    await inference.generate_fitting(rest()).run(steps)
