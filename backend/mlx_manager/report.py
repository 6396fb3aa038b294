"""Report of `mlx-manager doctor --report`: a machine, every kernel's check, one prompt step."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlx_manager.doctor import Finding, examine
from mlx_manager.machine import described, impersonal
from mlx_manager.mlx_server.config import DEMO_MODEL, MLXServerSettings
from mlx_manager.mlx_server.core import GenerationRequest, Sampling, StopRules, Tokens
from mlx_manager.mlx_server.errors import MLXManagerError

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.pool import ModelPoolManager

FORMAT = 1
"""Number of the report's shape; another shape has another."""
NO_GPU = "no GPU"
PROMPT_TOKENS = 256
ROUNDS = 5

Tell = Callable[[str], None]


def report(settings: MLXServerSettings, tell: Tell) -> dict[str, Any]:
    """The report, without personal data: no paths, user names or host names.

    `tell` hears what is being done, which takes minutes on a GPU.
    """
    found: dict[str, Any] = {"report": "mlx-manager doctor", "format": FORMAT}
    try:
        found["machine"] = described()
    except ImportError as error:
        found["machine"] = {"problem": impersonal(f"MLX can't be imported: {error}")}
    else:
        # First, while nothing has been compiled.
        found["kernels"] = kernels(tell)
        tell(f"timing prompts of {PROMPT_TOKENS} tokens")
        found["prompt_step"] = prompt_step()
    found["in_the_way"] = in_the_way(examine(settings))
    return found


def is_good(found: dict[str, Any]) -> bool:
    """Return whether everything in the report works."""
    checks = found.get("kernels", {}).get("checks", [])
    wrong = any(check["result"] == "wrong" for check in checks)
    problem = "problem" in found["machine"] or "problem" in found.get("prompt_step", {})
    return not (wrong or problem or found["in_the_way"])


def in_the_way(findings: list[Finding]) -> list[str]:
    """Names of what keeps `serve` from starting. Their texts have paths."""
    return [finding.name for finding in findings if not finding.ok]


def kernels(tell: Tell) -> dict[str, Any]:
    """Every kernel's check, with where they ran; none where there is no GPU.

    What CUDA's compiler made for an earlier run is on disk, and takes no time again.
    """
    import mlx.core as mx

    from mlx_manager.mlx_server.devices.checks import kernel_checks, reported
    from mlx_manager.mlx_server.devices.cuda.graphs import keep_kernels

    if mx.default_device().type != mx.gpu:
        return {"device": NO_GPU, "checks": []}
    # As the server has them compiled.
    keep_kernels()
    checks = []
    for check in kernel_checks():
        tell(f"checking {check.kernel}, head size {check.head_size}, {check.dtype}")
        entry = reported(check)
        if "reason" in entry:
            entry["reason"] = impersonal(entry["reason"])
        checks.append(entry)
    return {"device": "metal" if mx.metal.is_available() else "cuda", "checks": checks}


def prompt_step() -> dict[str, Any]:
    """Seconds that the engine takes from a prompt to its first token, with the embedded model.

    first: with what is compiled on the first step. median: of `ROUNDS` more.
    """
    from mlx_manager.mlx_server.models.pool import ModelPoolManager

    settings = MLXServerSettings(model=DEMO_MODEL)
    pool = ModelPoolManager(settings.pool, settings.catalog, settings.engine)
    try:
        first, *others = asyncio.run(_prompted(pool))
    except MLXManagerError as error:
        return {"model": DEMO_MODEL, "problem": impersonal(error.message)}
    return {
        "model": DEMO_MODEL,
        "tokens": PROMPT_TOKENS,
        "first_seconds": round(first, 5),
        "median_seconds": round(statistics.median(others), 5),
    }


async def _prompted(pool: ModelPoolManager) -> list[float]:
    try:
        return await _timed(pool)
    finally:
        await pool.close()


async def _timed(pool: ModelPoolManager) -> list[float]:
    taken = []
    async with pool.lease(DEMO_MODEL) as model:
        for number in range(1 + ROUNDS):
            # Each differs from its first token on: no prefix is shared.
            ids = tuple(3 + number + 7 * i % 50 for i in range(PROMPT_TOKENS))
            request = GenerationRequest(
                model=DEMO_MODEL,
                prompt=Tokens(ids),
                sampling=Sampling(temperature=0),
                stop=StopRules(ignore_eos=True),
                max_tokens=1,
            )
            begun = perf_counter()
            await model.backend.generate(request, lambda events, tokens: None)
            taken.append(perf_counter() - begun)
    return taken
