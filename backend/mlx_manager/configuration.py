"""`docs/configuration.md`, written from the table of settings.

Run with `python -m mlx_manager.configuration > docs/configuration.md`; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mlx_manager.mlx_server.settings import TABLE, Secret, Setting

INTRODUCTION = """# Configuration

Generated from the settings (`python -m mlx_manager.configuration`); a test fails when this page and
they differ.

- Each setting is an environment variable and an option of `mlx-manager serve`. The option wins.
- A value out of its range ends the program before it listens. A line names the setting.
- An `MLX_SERVER_` variable that is no setting has no effect, which the log says at the start.
- A variable that is set but empty is not unset: a list is then empty, any other setting is refused.
- Lists are separated by commas: `MLX_SERVER_CORS_ORIGINS=https://a.example,https://b.example`.
- A switch is `true` or `false` as a variable, `--prefix-cache` or `--no-prefix-cache` as an option.
- Sizes count in powers of 1024, as do those that the program shows. They may have a unit of their
  own: `MLX_SERVER_MEMORY_LIMIT_GB=8`, `8GB` and `8192MB` mean the same.

[operations.md](operations.md) says what to watch and what to turn.
"""

KINDS: Mapping[object, str] = {
    bool: "`true`, `false`",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    Path: "a path",
    Secret: "a secret",
}
"""Plain words for the types of settings."""

BESIDES: Mapping[str, str] = {
    "MLX_SERVER_BLAS": "On a Linux CPU: the BLAS library, or `off`; see `mlx-manager doctor`",
    "OPENBLAS_NUM_THREADS": "Threads of a Linux CPU's products; default: the cores less two",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "On an NVIDIA GPU: recorded steps that MLX keeps; default: 4000",
    "MLX_MAX_OPS_PER_BUFFER": "There: most operations in a recording; 1000 unless set, and "
    "`MLX_MAX_MB_PER_BUFFER` 1000000, so that a step is one. On a Mac MLX's own 40 or 50, since "
    "macOS ends a recording that takes seconds",
    "MLX_PTX_CACHE_DIR": "On an NVIDIA GPU: the folder of MLX's own compiled kernels; "
    "default: `~/.cache/mlx-manager/kernels`",
    "HF_HOME": "Where Hugging Face's cache is",
    "HF_ENDPOINT": "Address of another hub than huggingface.co",
    "HF_TOKEN": "The token for gated models",
    "HF_HUB_OFFLINE": "1: never ask Hugging Face's hub",
    "OTEL_EXPORTER_OTLP_HEADERS": "Headers for the collector, such as `authorization=Bearer%20...`",
    "OTEL_TRACES_SAMPLER": "Which calls are traced; default: all. `parentbased_traceidratio` "
    "traces the share that `OTEL_TRACES_SAMPLER_ARG` gives",
    "OTEL_RESOURCE_ATTRIBUTES": "Attributes of this server for every span",
    "LOGFIRE_TOKEN": "Token of the LogFire project; without one nothing is sent",
    "SSL_CERT_FILE": "Certificates to trust instead of the system's, for the hub",
    "NO_COLOR": "Any value: no colours in the terminal, nor in the log that goes to one",
}
"""Variables that are no settings."""


def page() -> str:
    sections = (
        section(title, rows) for title, rows in groupby(TABLE.values(), attrgetter("section"))
    )
    return "\n".join([INTRODUCTION, *sections, besides()])


def section(title: str, rows: Iterable[Setting]) -> str:
    head = "| Variable | Option | Values | Default | Meaning |\n|---|---|---|---|---|"
    return f"## {title}\n\n{head}\n" + "\n".join(map(line, rows)) + "\n"


def line(row: Setting) -> str:
    shown = default(row)
    return f"| `{row.variable}` | `{row.option}` | {values(row)} | {shown} | {row.text} |"


def besides() -> str:
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in BESIDES.items())
    return f"## Variables that are no settings\n\n| Variable | Meaning |\n|---|---|\n{rows}\n"


def default(row: Setting) -> str:
    match row.default:
        case None | ():
            return ""
        case bool(on):
            return f"`{str(on).lower()}`"
        case value:
            return f"`{value}`"


def values(row: Setting) -> str:
    """Return in words the values that a setting takes."""
    origin = get_origin(row.kind)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in get_args(row.kind))
    if "pattern" in row.bounds:
        return "a URL"
    return KINDS[origin or row.kind] + bounds(row.bounds)


def bounds(given: Mapping[str, Any]) -> str:
    match given:
        case {"ge": low, "le": high}:
            return f" from {low} to {high}"
        case {"gt": low, "le": high}:
            return f" over {low}, {high} at most"
        case {"ge": low}:
            return f", {low} or more"
        case {"gt": low}:
            return f" over {low}"
        case _:
            return ""


if __name__ == "__main__":
    print(page(), end="")
