"""`docs/configuration.md`: every setting, from the types that validate them.

Run with `python -m mlx_manager.configuration > docs/configuration.md`; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_manager.mlx_server.config import MLXServerSettings

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

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Where it listens, and who may come in": (
        *("host", "port", "ollama_port", "api_key", "api_keys_file", "admin_token", "open_access"),
        *("open_metrics", "allowed_hosts", "cors_origins", "key_requests_per_minute"),
        *("key_tokens_per_minute", "key_max_concurrent", "key_max_queued"),
    ),
    "Models": (
        *("model", "available_models", "model_aliases", "models_file", "models_dir", "hf_cache"),
        *("allow_download", "trust_remote_code"),
    ),
    "Memory and speed": (
        *("memory_limit_gb", "max_models", "model_ttl_seconds", "weights", "wire_weights"),
        *("max_rows", "max_waiting", "page_size", "prefill_chunk", "prefix_cache"),
    ),
    "Requests and answers": (
        *("max_headers_kb", "max_body_mb", "max_messages", "max_parts", "max_images"),
        *("max_tools", "max_inputs", "strict_fields", "validation_status"),
        *(
            "reasoning_field",
            "images_as_text",
            "response_store",
            "response_store_mb",
            "response_store_days",
        ),
    ),
    "Time": (
        *("keepalive_seconds", "timeout_seconds", "first_token_timeout_seconds"),
        *("queue_timeout_seconds", "client_timeout_seconds", "load_timeout_seconds"),
        *("drain_seconds", "watchdog_seconds", "keep_awake"),
    ),
    "Logs, metrics and traces": (
        *("log_level", "log_format", "log_prompts", "metrics_by_key", "audit_log", "audit_log_mb"),
        *("audit_log_days", "logfire_enabled", "otlp_endpoint"),
    ),
}
OTHERS = "Others"

KINDS: Mapping[str, str] = {
    "array": "a list",
    "boolean": "`true`, `false`",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "path": "a path",
    "password": "a secret",
    "^https?://.+": "a URL",
}
"""Plain words for JSON Schema's types, formats and patterns."""

BESIDES: Mapping[str, str] = {
    "MLX_SERVER_BLAS": "On a Linux CPU: the BLAS library, or `off`; see `mlx-manager doctor`",
    "OPENBLAS_NUM_THREADS": "Threads of a Linux CPU's products; default: the cores less two",
    "TOKENIZERS_PARALLELISM": "On a Linux CPU: `true` tokenises several texts at once; default: "
    "`false`",
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
    sections = (section(title, names) for title, names in groups())
    return "\n".join([INTRODUCTION, *sections, besides()])


def groups() -> Iterator[tuple[str, list[str]]]:
    """Titles with the names of settings; what is in no group comes last."""
    grouped = {name for names in GROUPS.values() for name in names}
    rest = [name for name in MLXServerSettings.model_fields if name not in grouped]
    for title, names in GROUPS.items():
        yield title, list(names)
    if rest:
        yield OTHERS, rest


def section(title: str, names: list[str]) -> str:
    properties = MLXServerSettings.model_json_schema()["properties"]
    rows = "\n".join(row(name, properties[name]) for name in names)
    head = "| Variable | Option | Values | Default | Meaning |\n|---|---|---|---|---|"
    return f"## {title}\n\n{head}\n{rows}\n"


def row(name: str, schema: Mapping[str, Any]) -> str:
    option = f"--{name.replace('_', '-')}"
    shown = "" if schema["default"] in (None, []) else f"`{plain(schema['default'])}`"
    return (
        f"| `MLX_SERVER_{name.upper()}` | `{option}` | {values(schema)} | {shown} "
        f"| {schema['description']} |"
    )


def besides() -> str:
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in BESIDES.items())
    return f"## Variables that are no settings\n\n| Variable | Meaning |\n|---|---|\n{rows}\n"


def plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def values(schema: Mapping[str, Any]) -> str:
    """Return in words the values that a setting takes, from its JSON Schema."""
    # None, where it is a default, can't be asked for.
    schema = schema["anyOf"][0] if "anyOf" in schema else schema
    if "enum" in schema:
        return ", ".join(f"`{option}`" for option in schema["enum"])
    for keyword in ("format", "pattern"):
        if schema.get(keyword) in KINDS:
            return KINDS[schema[keyword]]
    return KINDS[schema["type"]] + bounds(schema)


def bounds(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low} to {high}"
        case {"exclusiveMinimum": low, "maximum": high}:
            return f" over {low}, {high} at most"
        case {"minimum": low}:
            return f", {low} or more"
        case {"exclusiveMinimum": low}:
            return f" over {low}"
        case _:
            return ""


if __name__ == "__main__":
    print(page(), end="")
