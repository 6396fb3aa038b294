"""The table of settings: each with its type, default, text, bounds and the word for its value.

From this table come the settings as they are validated (`config`), the options of `serve`
(`cli.settings`) and docs/configuration.md (`configuration`). It imports the standard library only,
so that `--help` is instant.
"""

# ruff: noqa: RUF009  # `setting` is `dataclasses.field`, which that rule lets pass.

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from pydantic import SecretStr

    Secret = SecretStr
else:

    class Secret:
        """Text that is never shown. `config` has `pydantic.SecretStr`, slow to import, for it."""


PREFIX = "MLX_SERVER_"
MOST = 2**20
"""Upper bound of sizes in kB, MB or GB. More was meant in bytes, and MLX and SQLite refuse it."""

ReasoningField = Literal["reasoning_content", "reasoning"]
ImagesAsText = Literal["history", "never", "always"]
Speculation = Literal["auto", "on", "off"]
KVBits = Literal[16, 8]
Distributed = Literal["auto", "nccl", "ring", "mpi"]


def setting(default: object, text: str, metavar: str | None = None, **bounds: Any) -> Any:
    """Return the declaration of a setting.

    metavar: the word for its value in `--help`; None: by its type. bounds: as `pydantic.Field`
    takes them.
    """
    return field(default=default, metadata={"text": text, "metavar": metavar, "bounds": bounds})


def size(default: float | None, text: str) -> Any:
    """Return the declaration of a size, in the unit that its name ends in."""
    return setting(default, text, "SIZE", gt=0, le=MOST, allow_inf_nan=False)


@dataclass
class Access:
    """Address and access"""

    host: str = setting("127.0.0.1", "Address to listen on", "ADDRESS", min_length=1)
    port: int = setting(8000, "Port to listen on; 0 picks a free one", ge=0, le=65535)
    ollama_port: int | None = setting(
        None, "Second port to listen on, such as 11434, where Ollama's clients look", ge=1, le=65535
    )
    ui: bool = setting(True, "Serve a page for browsers at / and /ui")
    api_key: Secret | None = setting(
        None,
        "API key that requests must send; a variable hides it from other users",
        "KEY",
        min_length=1,
    )
    api_keys_file: Path | None = setting(
        None, "File of named API keys, stored as hashes; `mlx-manager key add` writes it", "FILE"
    )
    admin_token: Secret | None = setting(
        None,
        "Token for /v1/admin; without one, /v1/admin answers only this machine",
        "TOKEN",
        min_length=8,
    )
    open_access: bool = setting(False, "Serve other machines without any key")
    open_metrics: bool = setting(False, "Answer /metrics without a key")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host names that browsers may use for a server without keys, comma-separated",
        "NAME,NAME,...",
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose web pages may read answers, comma-separated; `*` for all", "ORIGIN,..."
    )
    key_requests_per_minute: int | None = setting(
        None, "Requests a minute for each key that has no limit of its own", ge=1
    )
    key_tokens_per_minute: int | None = setting(
        None,
        "Tokens a minute, prompts and answers, for each key that has no limit of its own",
        ge=1,
    )
    key_max_concurrent: int | None = setting(
        None, "Requests of one key that run at once; further ones wait", ge=1
    )
    key_max_queued: int = setting(
        64, "Requests of one key that may wait; further ones get 429", ge=0
    )
    key_own_prefixes: bool = setting(
        False, "What is kept of a key's prompts is found by its own requests alone"
    )


@dataclass
class Models:
    """Models"""

    model: str = setting(
        "mlx-manager/demo",
        "Model that answers requests which name none; loaded at the start",
        "ID|FOLDER",
        min_length=1,
    )
    available_models: tuple[str, ...] = setting(
        (), "More models to offer, as Hugging Face ids or folders, comma-separated", "ID,ID,..."
    )
    model_aliases: tuple[tuple[str, str], ...] = setting(
        (),
        "Names that stand for others, such as `claude-*=mlx-manager/demo,gpt-*=...`",
        "NAME=ID,...",
    )
    models_file: Path | None = setting(
        None, "TOML file with settings of single models; read again on SIGHUP", "FILE"
    )
    models_dir: Path | None = setting(None, "Folder whose sub-folders are models", "FOLDER")
    hf_cache: bool = setting(True, "Offer the models found in the Hugging Face cache")
    allow_download: bool = setting(False, "Download a configured model when a request asks for it")
    trust_remote_code: bool = setting(False, "Run Python code that a model repository ships")


@dataclass
class Memory:
    """Memory and speed"""

    memory_limit_gb: float | None = size(
        None,
        "Memory for weights and KV pages; default: 90 % of the device's memory, less what other "
        "programs use of an NVIDIA GPU",
    )
    max_models: int = setting(4, "Models kept in memory at once", ge=1)
    model_ttl_seconds: float | None = setting(
        None,
        "Seconds without use after which a model is unloaded; 0 is at once; default: never",
        ge=0,
    )
    weights: Literal["auto", "keep", "dequantize"] = setting(
        "auto", "Weights in memory: the fastest form that fits, as stored, or dense"
    )
    wire_weights: bool = setting(
        False, "On a Mac: never page the weights out; macOS may panic, see docs/operations.md"
    )
    devices: int = setting(
        1,
        "Devices that each model is spread over, such as the GPUs of this machine, with a process "
        "for each; the models' file may say otherwise for a model",
        ge=1,
        le=64,
    )
    distributed: Distributed = setting(
        "auto",
        "What joins the devices of a model on this machine: auto is nccl on NVIDIA GPUs and ring "
        "elsewhere; mpi needs Open MPI",
    )
    max_rows: int = setting(128, "Sequences decoded together, per model", ge=1)
    max_waiting: int = setting(
        1024, "Requests that may wait for one model; further ones get 429", ge=0
    )
    page_size: int = setting(16, "Tokens in a KV page", ge=1, le=256)
    prefill_chunk: int | None = setting(
        None,
        "Most prompt tokens in one step; default 512, on a GPU 2048, or less, or 8192 where that "
        "takes under 80 ms",
        ge=16,
    )
    kv_bits: KVBits = setting(
        16,
        "Bits of a number in KV pages: 16 (as in the weights, or float32 on a CPU), or 8, which "
        "takes about half the memory",
    )
    prefix_cache: bool = setting(True, "Reuse the KV pages of prompts that begin alike")
    image_cache_mb: float = size(
        512,
        "Size limit of what a model has read of pictures and keeps for more questions about them; "
        "the least recently used are removed",
    )
    prefix_disk_gb: float | None = size(
        None,
        "Disk for prompts that memory has no room for and that outlive the server; all models "
        "together, the least recently used are removed; default: none",
    )
    prefix_write_gb_per_day: float | None = size(
        None, "Most that is written there a day; default: as much as it may hold"
    )
    prefix_disk_dir: Path | None = setting(
        None, "Folder for it, for servers of one user; default: in the user's cache", "FOLDER"
    )
    speculation: Speculation = setting(
        "auto",
        "Try several tokens in one step that an answer repeats or has to have: where that is "
        "faster, wherever there are such tokens, or never",
    )
    draft_tokens: int = setting(15, "Most tokens that are tried in one step", ge=1, le=64)
    draft_model: str | None = setting(
        None,
        "A smaller model that guesses tokens to be tried, for every model that has the same "
        "tokenizer; in the models' file a model may have another",
        "MODEL",
        min_length=1,
    )


@dataclass
class Requests:
    """Requests and answers"""

    max_headers_kb: float = size(64, "Largest request headers accepted")
    max_body_mb: float = size(32, "Largest request body accepted")
    max_images: int = setting(64, "Most images in one conversation", ge=0)
    max_image_mb: float = size(20, "Largest image accepted")
    max_image_megapixels: float = setting(
        50, "Most pixels of one image, in millions; refused by the file's header", gt=0, le=89
    )
    image_hosts: tuple[str, ...] = setting(
        (),
        "Hosts from which images are fetched, such as `example.com` or `*.example.com`; `*` for "
        "all public ones; default: none, images come in the request",
        "NAME,NAME,...",
    )
    image_fetch_seconds: float = setting(
        10, "Seconds that fetching one image may take, redirects included", gt=0
    )
    strict_fields: bool = setting(
        False, "Refuse unknown request fields instead of naming them in a header"
    )
    validation_status: Literal[400, 422] = setting(
        422, "Status of a value out of its range in chat and completions"
    )
    reasoning_field: ReasoningField = setting(
        "reasoning_content", "Field of a chat answer that holds the thinking"
    )
    images_as_text: ImagesAsText = setting(
        "history",
        "Pictures that a line stands for, where a model sees none: those in tools' results and "
        "before the last answer; none, which refuses them; or all",
    )
    response_store: Path | None = setting(
        None,
        "File that stores the answers of /v1/responses; default: memory, until the server ends",
        "FILE",
    )
    response_store_mb: float = size(
        64, "Size limit of the stored answers; the least recently used are removed"
    )
    response_store_images_mb: float = size(
        256, "Size limit of the images of stored answers; those least recently used are removed"
    )
    response_store_days: float = setting(
        30, "Days without use after which a stored answer is removed", gt=0
    )
    websockets: bool = setting(
        True, "Serve /v1/responses as a WebSocket, too, as Codex asks for it"
    )


@dataclass
class Time:
    """Time"""

    keepalive_seconds: float = setting(
        10, "Seconds of silence after which a stream gets a keep-alive comment", gt=0
    )
    timeout_seconds: float | None = setting(
        None, "Seconds for a whole answer; a request can set a shorter time", gt=0
    )
    first_token_timeout_seconds: float | None = setting(
        None, "Seconds until an answer begins; a request can set a shorter time", gt=0
    )
    queue_timeout_seconds: float | None = setting(
        None, "Seconds in the queue of a loaded model; a request can set a shorter time", gt=0
    )
    client_timeout_seconds: float = setting(
        60, "Seconds that a client may take to send its headers, or may neither send nor read", gt=0
    )
    load_timeout_seconds: float = setting(
        300, "Time a load may go without getting further before it fails; 0 is off", ge=0
    )
    drain_seconds: float = setting(
        25,
        "Seconds that running requests get to finish when the server stops",
        ge=0,
        allow_inf_nan=False,
    )
    watchdog_seconds: float = setting(
        300,
        "Seconds without a step, while requests wait, until a model's process is ended; 0: never",
        ge=0,
    )
    keep_awake: bool = setting(False, "Keep a Mac from falling asleep while requests are under way")


@dataclass
class Logs:
    """Logs, metrics and traces"""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Lowest level that is logged"
    )
    log_format: Literal["pretty", "json"] = setting(
        "pretty", "Lines for people, or one JSON object a line"
    )
    log_prompts: bool = setting(False, "Write every prompt to the log, where others may read it")
    metrics_by_key: bool = setting(False, "Count calls and tokens of each API key in /metrics")
    audit_log: Path | None = setting(
        None,
        "File that stores who called which model when; default: memory, until the server ends",
        "FILE",
    )
    audit_log_mb: float = size(64, "Size limit of the audit log; the oldest calls are removed")
    audit_log_days: float = setting(
        90, "Days after which a call is removed from the audit log", gt=0
    )
    logfire_enabled: bool = setting(False, "Send traces to LogFire")
    otlp_endpoint: str | None = setting(
        None,
        "Send traces to this OpenTelemetry collector, such as `http://localhost:4318`",
        "URL",
        pattern="^https?://.+",
    )


class Settings(Access, Models, Memory, Requests, Time, Logs):
    """All settings, by the sections of docs/configuration.md."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. section: the title above it.

    kind: bool, int, float, str, Path, `Secret`, a tuple or a `Literal`; where `default` is None, it
    is the type of the values besides None.
    """

    name: str
    kind: Any
    default: Any
    text: str
    section: str
    bounds: Mapping[str, Any]
    metavar: str | None

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.name.upper()}"

    @property
    def is_size(self) -> bool:
        """True if the value may have a unit, such as `8GB`."""
        return self.metavar == "SIZE"


TABLE: Mapping[str, Setting] = {
    row.name: Setting(
        row.name,
        row.type if row.default is not None else get_args(row.type)[0],
        row.default,
        row.metadata["text"],
        str(section.__doc__),
        row.metadata["bounds"],
        row.metadata["metavar"],
    )
    for section in Settings.__bases__
    for row in fields(section)
}
"""All rows by their names, in the order of the sections."""
