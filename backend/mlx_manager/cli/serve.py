"""`mlx-manager serve`, and every setting of the server as an option."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.terminal import ExitCode, complain, fail

if TYPE_CHECKING:
    from mlx_manager.mlx_server.config import MLXServerSettings


def option(text: str, default: str | None = None, metavar: str | None = None) -> Any:
    shown = text if default is None else f"{text} [{default}]"
    return typer.Option(help=shown, metavar=metavar)


def number(text: str, default: str | None = None) -> Any:
    return option(text, default, "N")


def size_of(text: str, default: str | None = None) -> Any:
    return option(text, default, "SIZE")


# The settings, one alias each. A test holds names, texts and defaults against
# `MLXServerSettings`, which is too slow to import for `--help`.
Model = Annotated[
    str | None,
    option(
        "Model that answers requests which name none; loaded at the start",
        "mlx-manager/demo",
        "ID|FOLDER",
    ),
]
AvailableModels = Annotated[
    str | None,
    option(
        "More models to offer, as Hugging Face ids or folders, comma-separated", None, "ID,ID,..."
    ),
]
ModelAliases = Annotated[
    str | None,
    option(
        "Names that stand for others, such as `claude-*=mlx-manager/demo,gpt-*=...`",
        None,
        "NAME=ID,...",
    ),
]
ModelsFile = Annotated[
    Path | None,
    option("TOML file with settings of single models; read again on SIGHUP", None, "FILE"),
]
ModelsDir = Annotated[Path | None, option("Folder whose sub-folders are models", None, "FOLDER")]
HfCache = Annotated[bool | None, option("Offer the models found in the Hugging Face cache", "on")]
AllowDownload = Annotated[
    bool | None, option("Download a configured model when a request asks for it", "off")
]
TrustRemoteCode = Annotated[
    bool | None, option("Run Python code that a model repository ships", "off")
]
Host = Annotated[str | None, option("Address to listen on", "127.0.0.1", "ADDRESS")]
Port = Annotated[int | None, number("Port to listen on; 0 picks a free one", "8000")]
OllamaPort = Annotated[
    int | None,
    number("Second port to listen on, such as 11434, where Ollama's clients look"),
]
ApiKey = Annotated[
    str | None,
    option("API key that requests must send; a variable hides it from other users", None, "KEY"),
]
AdminToken = Annotated[
    str | None,
    option("Token for /v1/admin; without one, /v1/admin answers only this machine", None, "TOKEN"),
]
ApiKeysFile = Annotated[
    Path | None,
    option(
        "File of named API keys, stored as hashes; `mlx-manager key add` writes it", None, "FILE"
    ),
]
OpenAccess = Annotated[bool | None, option("Serve other machines without any key", "off")]
OpenMetrics = Annotated[bool | None, option("Answer /metrics without a key", "off")]
AllowedHosts = Annotated[
    str | None,
    option(
        "Host names that browsers may use for a server without keys, comma-separated",
        None,
        "NAME,NAME,...",
    ),
]
CorsOrigins = Annotated[
    str | None,
    option(
        "Origins whose web pages may read answers, comma-separated; `*` for all", None, "ORIGIN,..."
    ),
]
KeyRequestsPerMinute = Annotated[
    int | None, number("Requests a minute for each key that has no limit of its own")
]
KeyTokensPerMinute = Annotated[
    int | None,
    number("Tokens a minute, prompts and answers, for each key that has no limit of its own"),
]
KeyMaxConcurrent = Annotated[
    int | None, number("Requests of one key that run at once; further ones wait")
]
KeyMaxQueued = Annotated[
    int | None, number("Requests of one key that may wait; further ones get 429", "64")
]
MaxHeadersKb = Annotated[str | None, size_of("Largest request headers accepted", "64")]
MaxMessages = Annotated[int | None, number("Most messages or items in one conversation", "4096")]
MaxParts = Annotated[int | None, number("Most content parts in one conversation", "16384")]
MaxImages = Annotated[int | None, number("Most images in one conversation", "64")]
MaxTools = Annotated[int | None, number("Most tools in one request", "1024")]
MaxInputs = Annotated[
    int | None, number("Most texts that one request may have embedded or ranked", "2048")
]
MaxBodyMb = Annotated[str | None, size_of("Largest request body accepted", "32")]
KeepaliveSeconds = Annotated[
    float | None,
    number("Seconds of silence after which a stream gets a keep-alive comment", "10"),
]
TimeoutSeconds = Annotated[
    float | None, number("Seconds for a whole answer; a request can set a shorter time")
]
FirstTokenTimeoutSeconds = Annotated[
    float | None, number("Seconds until an answer begins; a request can set a shorter time")
]
QueueTimeoutSeconds = Annotated[
    float | None, number("Seconds in the queue of a loaded model; a request can set a shorter time")
]
ClientTimeoutSeconds = Annotated[
    float | None,
    number(
        "Seconds that a client may take to send its headers, or may neither send nor read", "60"
    ),
]
LoadTimeoutSeconds = Annotated[
    float | None,
    number("Time a load may go without getting further before it fails; 0 is off", "300"),
]
DrainSeconds = Annotated[
    float | None,
    number("Seconds that running requests get to finish when the server stops", "25"),
]
WatchdogSeconds = Annotated[
    float | None,
    number(
        "Seconds without a step, while requests wait, until a model's process is ended; 0: never",
        "300",
    ),
]
KeepAwake = Annotated[
    bool | None, option("Keep a Mac from falling asleep while requests are under way", "off")
]
StrictFields = Annotated[
    bool | None,
    option("Refuse unknown request fields instead of naming them in a header", "off"),
]
ValidationStatus = Annotated[
    int | None,
    option("Status of a value out of its range in chat and completions", "422", "400|422"),
]
ReasoningField = Annotated[
    str | None,
    option(
        "Field of a chat answer that holds the thinking",
        "reasoning_content",
        "reasoning_content|reasoning",
    ),
]
Websockets = Annotated[
    bool | None,
    option("Serve /v1/responses as a WebSocket, too, as Codex asks for it", "on"),
]
ImagesAsText = Annotated[
    str | None,
    option(
        "Pictures that a line stands for, where no model sees them: those in tools' results and "
        "before the last answer; none, which refuses them; or all",
        "history",
        "history|never|always",
    ),
]
MemoryLimitGb = Annotated[
    str | None,
    size_of(
        "Memory for weights and KV pages; default: 90 % of the device's memory, less what other "
        "programs use of an NVIDIA GPU"
    ),
]
MaxModels = Annotated[int | None, number("Models kept in memory at once", "4")]
ModelTtlSeconds = Annotated[
    float | None,
    number("Seconds without use after which a model is unloaded; 0 is at once; default: never"),
]
Weights = Annotated[
    str | None,
    option(
        "Weights in memory: the fastest form that fits, as stored, or dense",
        "auto",
        "auto|keep|dequantize",
    ),
]
WireWeights = Annotated[
    bool | None,
    option("On a Mac: never page the weights out; macOS may panic, see docs/operations.md", "off"),
]
MaxRows = Annotated[int | None, number("Sequences decoded together, per model", "128")]
MaxWaiting = Annotated[
    int | None, number("Requests that may wait for one model; further ones get 429", "1024")
]
PageSize = Annotated[int | None, number("Tokens in a KV page", "16")]
PrefillChunk = Annotated[
    int | None,
    number(
        "Most prompt tokens in one step; default 512, on a GPU 2048, or less, or 8192 where that "
        "takes under 80 ms"
    ),
]
PrefixCache = Annotated[bool | None, option("Reuse the KV pages of prompts that begin alike", "on")]
ResponseStore = Annotated[
    Path | None,
    option(
        "File that stores the answers of /v1/responses; default: memory, until the server ends",
        None,
        "FILE",
    ),
]
ResponseStoreMb = Annotated[
    str | None,
    size_of("Size limit of the stored answers; the least recently used are removed", "64"),
]
ResponseStoreDays = Annotated[
    float | None, number("Days without use after which a stored answer is removed", "30")
]
AuditLog = Annotated[
    Path | None,
    option(
        "File that stores who called which model when; default: memory, until the server ends",
        None,
        "FILE",
    ),
]
AuditLogMb = Annotated[
    str | None, size_of("Size limit of the audit log; the oldest calls are removed", "64")
]
AuditLogDays = Annotated[
    float | None, number("Days after which a call is removed from the audit log", "90")
]
LogLevel = Annotated[
    str | None, option("Lowest level that is logged", "info", "debug|info|warning|error")
]
LogFormat = Annotated[
    str | None, option("Lines for people, or one JSON object a line", "pretty", "pretty|json")
]
LogPrompts = Annotated[
    bool | None, option("Write every prompt to the log, where others may read it", "off")
]
MetricsByKey = Annotated[
    bool | None, option("Count calls and tokens of each API key in /metrics", "off")
]
LogfireEnabled = Annotated[bool | None, option("Send traces to LogFire", "off")]
OtlpEndpoint = Annotated[
    str | None,
    option(
        "Send traces to this OpenTelemetry collector, such as `http://localhost:4318`", None, "URL"
    ),
]


def serve(
    context: typer.Context,
    *,
    model: Model = None,
    available_models: AvailableModels = None,
    model_aliases: ModelAliases = None,
    models_file: ModelsFile = None,
    models_dir: ModelsDir = None,
    hf_cache: HfCache = None,
    allow_download: AllowDownload = None,
    trust_remote_code: TrustRemoteCode = None,
    host: Host = None,
    port: Port = None,
    ollama_port: OllamaPort = None,
    api_key: ApiKey = None,
    admin_token: AdminToken = None,
    api_keys_file: ApiKeysFile = None,
    open_access: OpenAccess = None,
    open_metrics: OpenMetrics = None,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    key_requests_per_minute: KeyRequestsPerMinute = None,
    key_tokens_per_minute: KeyTokensPerMinute = None,
    key_max_concurrent: KeyMaxConcurrent = None,
    key_max_queued: KeyMaxQueued = None,
    max_body_mb: MaxBodyMb = None,
    max_headers_kb: MaxHeadersKb = None,
    max_messages: MaxMessages = None,
    max_parts: MaxParts = None,
    max_images: MaxImages = None,
    max_tools: MaxTools = None,
    max_inputs: MaxInputs = None,
    keepalive_seconds: KeepaliveSeconds = None,
    timeout_seconds: TimeoutSeconds = None,
    first_token_timeout_seconds: FirstTokenTimeoutSeconds = None,
    queue_timeout_seconds: QueueTimeoutSeconds = None,
    client_timeout_seconds: ClientTimeoutSeconds = None,
    load_timeout_seconds: LoadTimeoutSeconds = None,
    drain_seconds: DrainSeconds = None,
    watchdog_seconds: WatchdogSeconds = None,
    keep_awake: KeepAwake = None,
    strict_fields: StrictFields = None,
    validation_status: ValidationStatus = None,
    reasoning_field: ReasoningField = None,
    websockets: Websockets = None,
    images_as_text: ImagesAsText = None,
    response_store: ResponseStore = None,
    response_store_mb: ResponseStoreMb = None,
    response_store_days: ResponseStoreDays = None,
    memory_limit_gb: MemoryLimitGb = None,
    max_models: MaxModels = None,
    model_ttl_seconds: ModelTtlSeconds = None,
    weights: Weights = None,
    wire_weights: WireWeights = None,
    max_rows: MaxRows = None,
    max_waiting: MaxWaiting = None,
    page_size: PageSize = None,
    prefill_chunk: PrefillChunk = None,
    prefix_cache: PrefixCache = None,
    audit_log: AuditLog = None,
    audit_log_mb: AuditLogMb = None,
    audit_log_days: AuditLogDays = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    log_prompts: LogPrompts = None,
    metrics_by_key: MetricsByKey = None,
    logfire_enabled: LogfireEnabled = None,
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Serve models over the OpenAI and Anthropic APIs until interrupted.

    Every option is also an environment variable: --max-rows is MLX_SERVER_MAX_ROWS. The option
    wins.

    \b
    Examples:
      mlx-manager serve
      mlx-manager serve --model mlx-community/Llama-3.2-3B-Instruct-4bit --port 9000
      mlx-manager serve --models-dir ~/models --memory-limit-gb 24
    """
    if (log_format or os.environ.get("MLX_SERVER_LOG_FORMAT")) == "json":
        from mlx_manager.mlx_server.observability.logs import capture_output

        capture_output()
    settings = parse_settings(context.params)
    require_mlx()
    from mlx_manager.mlx_server.main import run

    run(settings)


def parse_settings(given: dict[str, Any]) -> MLXServerSettings:
    """The settings of the environment with what was `given` (not None) on the command line.

    Ends the program with exit code 2, naming the option, when a value is out of range.
    """
    check_hub_address()
    from pydantic import ValidationError

    from mlx_manager.mlx_server.config import MLXServerSettings

    try:
        return MLXServerSettings(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0])
            setting = f"--{name.replace('_', '-')} (MLX_SERVER_{name.upper()})"
            rule = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
            rule = rule.replace(" items,", " characters,").replace(" item,", " character,")
            kind, should, _ = rule.partition(" should ")
            complain(f"{setting}{rule[len(kind) :]}" if should else f"{setting}: {rule}")
        raise typer.Exit(ExitCode.USAGE) from None


def check_hub_address() -> None:
    """End the program with exit code 2 where HF_ENDPOINT can't be read as an address: with it the
    hub's client can't even be imported, nor what builds on it.
    """
    from urllib.parse import urlsplit

    hub = os.environ.get("HF_ENDPOINT", "")
    try:
        _ = urlsplit(hub).port
    except ValueError:
        fail(f"HF_ENDPOINT: {hub} is no address such as https://huggingface.co.", ExitCode.USAGE)


def require_mlx() -> None:
    """End the program with exit code 1, saying what to install, where MLX can't be imported."""
    try:
        importlib.import_module("mlx_manager.mlx_server.utils.memory")
    except ImportError as error:
        from mlx_manager.doctor import INSTALL_MLX

        fail(f"MLX can't be imported: {error}. {INSTALL_MLX}")
