"""Memory that models would take on this machine, in the words of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_manager.cli.terminal import ExitCode, fail, note, show, table
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.mlx_server.models.plan import MemoryPlan


def memory_limit(settings: MLXServerSettings) -> int:
    """Return the bytes that models may take: the owner's setting, or what this device allows."""
    if settings.pool.memory_limit is not None:
        return settings.pool.memory_limit
    from mlx_manager.mlx_server.utils.memory import default_limit

    return default_limit()


def print_plan(settings: MLXServerSettings) -> None:
    """Print what each model on offer would take."""
    from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError
    from mlx_manager.mlx_server.models.catalog import Catalog, check_models_dir
    from mlx_manager.mlx_server.models.plan import plan_of_source
    from mlx_manager.mlx_server.models.settings import read_models_file

    try:
        check_models_dir(settings.models_dir)
        owners = read_models_file(settings.models_file)
    except InvalidSettings as error:
        fail(error.message, ExitCode.USAGE)
    limit = memory_limit(settings)
    numbers = ("weights", "context", "KV a token", "tokens", "rows")
    shown = table("model", "fits", *numbers, right=numbers)
    for source in Catalog(settings.catalog, owners).models():
        try:
            plan = plan_of_source(source, limit)
        except MLXManagerError as error:
            shown.add_row(source.id, error.message, *[""] * len(numbers))
        else:
            shown.add_row(source.id, "yes" if plan.fits else "no", *figures(plan))
    show(shown)
    note(f"{sized(limit)} of memory for models. Tokens: of all rows together. Rows: that are as")
    note("long as the context. On a CPU keys and values take twice as much.")


def figures(plan: MemoryPlan) -> tuple[str, ...]:
    """Return the numbers of a plan; those that are not known are empty."""
    return (
        sized(plan.weights),
        "" if plan.context_length is None else f"{plan.context_length:,}",
        sized(plan.token_bytes) if plan.token_bytes else "",
        "" if plan.tokens is None else f"{plan.tokens:,}",
        "" if plan.rows_at_context is None else f"{plan.rows_at_context:,}",
    )


def sentence(plan: MemoryPlan) -> str:
    """Return a plan in words."""
    whole = f"{sized(plan.weights)} of weights, {sized(plan.limit)} for models on this machine"
    if not plan.fits:
        return f"It does not fit: {whole}."
    if plan.tokens is None or plan.token_bytes is None:
        return f"It fits: {whole}."
    rows = "" if plan.rows_at_context is None else f", or {plan.rows_at_context:,} whole contexts"
    room = f"{sized(plan.token_bytes)} a token leave room for {plan.tokens:,} tokens{rows}"
    return f"It fits: {whole}; {room}."
