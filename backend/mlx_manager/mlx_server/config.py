"""Settings, parsed once from the environment (`MLX_SERVER_`) into frozen parts for each module."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlx_manager.mlx_server.address import as_browsers_say, is_host, origin_as_browsers_say

DEMO_MODEL = "mlx-manager/demo"
# `devices/cpu/blas.py` reads these before there are settings.
NOT_A_SETTING = {"MLX_SERVER_BLAS"}
# Upper bound of settings in kB, MB or GB. More was meant in bytes, and MLX and SQLite refuse it.
MOST = 2**20
SIZES = ("memory_limit_gb", "max_body_mb", "max_headers_kb", "response_store_mb", "audit_log_mb")
UNITS = {"kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
WITH_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt])i?b?\s*", re.IGNORECASE)
PATHS = ("api_keys_file", "models_file", "models_dir", "response_store", "audit_log")


def _number(value: object) -> object:
    """Read the digits of an environment variable as the number that they are."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


ReasoningField = Literal["reasoning_content", "reasoning"]
ImagesAsText = Literal["history", "never", "always"]
ValidationStatus = Annotated[Literal[400, 422], BeforeValidator(_number)]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one model's engine.

    max_rows: sequences decoded together. max_waiting: requests queued beyond those.
    page_size: tokens a KV page. prefill_chunk: most prompt tokens processed in one step (None: by
    the device).
    prefix_cache: unreferenced pages stay for reuse.
    """

    max_rows: int = 128
    max_waiting: int = 1024
    page_size: int = 16
    prefill_chunk: int | None = None
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the model pool, and the ways to load models.

    max_models: models that are loaded at once. memory_limit: bytes of all models together; None: by
    the device. ttl: seconds without use after which a model is unloaded, unless its own settings
    say otherwise. wire_weights: macOS keeps as many bytes in memory as the weights have.
    load_timeout: seconds that a load may go without progress; None: no limit.
    """

    max_models: int = 4
    ttl: float = math.inf
    memory_limit: int | None = None
    weights: Literal["auto", "keep", "dequantize"] = "auto"
    trust_remote_code: bool = False
    wire_weights: bool = False
    load_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class CatalogSources:
    """Places of loadable models. allow_download: models that the owner names may be downloaded.

    model_aliases: patterns of names, each with the id it stands for; the first match counts.
    models_file: TOML with the settings of single models (`models.settings`).
    """

    default_model: str = DEMO_MODEL
    available_models: tuple[str, ...] = ()
    models_file: Path | None = None
    models_dir: Path | None = None
    hf_cache: bool = True
    allow_download: bool = False
    model_aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Limits of the HTTP rim, and its choices of names. Sizes in bytes, times in seconds.

    keepalive: silence on a stream before a keep-alive comment. client_timeout: time for a client to
    send its headers, and later the time in which it may neither send nor read anything.
    """

    max_body: int = 32 * 2**20
    keepalive: float = 10.0
    client_timeout: float = 60.0
    strict_fields: bool = False
    validation_status: int = 422
    reasoning_field: ReasoningField = "reasoning_content"
    max_messages: int = 4096
    max_parts: int = 16384
    max_images: int = 64
    max_tools: int = 1024
    max_inputs: int = 2048
    images_as_text: ImagesAsText = "history"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key; None is no limit.

    max_concurrent: requests under way at once. max_queued: further requests, which wait for their
    turn. priority: the most urgent `priority` that a request may have.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_queued: int = 64
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Rules for access to the server.

    key: the environment's key. keys_file: file of further keys, hashed. limits: limits of keys that
    have none of their own. open_access: if there are no keys, everybody has access, wherever the
    server listens. allowed_hosts: names of the server, besides addresses and names without a dot.
    admin_token: the token that the admin API demands.
    """

    host: str = "127.0.0.1"
    key: str | None = field(default=None, repr=False)
    keys_file: Path | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    open_access: bool = False
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    admin_token: str | None = field(default=None, repr=False)

    @property
    def need_key(self) -> bool:
        return self.key is not None or self.keys_file is not None


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a call, in seconds; None: no limit.

    queue: wait for its turn, once its model is loaded. first_token: from arrival to the first token
    (TTFT). total: from arrival to the end.
    """

    queue: float | None = None
    first_token: float | None = None
    total: float | None = None

    def and_also(self, other: TimeLimits) -> TimeLimits:
        """Return the limits of both: the shorter of each two."""
        return TimeLimits(
            _shorter(self.queue, other.queue),
            _shorter(self.first_token, other.first_token),
            _shorter(self.total, other.total),
        )


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Storage of responses. path: its file; None: in memory. max_age: seconds without use."""

    path: Path | None = None
    max_bytes: int = 64 * 2**20
    max_age: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """Storage of the audit log. path: its file; None: in memory. max_age: seconds."""

    path: Path | None = None
    max_bytes: int = 64 * 2**20
    max_age: float = 90 * 86400.0


@dataclass(frozen=True, slots=True)
class TraceTargets:
    """Targets of spans: LogFire, and an OTLP collector at a base URL."""

    logfire: bool = False
    otlp: str | None = None

    @property
    def wanted(self) -> bool:
        return self.logfire or self.otlp is not None


class MLXServerSettings(BaseSettings):
    """Every setting of the server; each is an environment variable `MLX_SERVER_<NAME>`."""

    model_config = SettingsConfigDict(
        env_prefix="MLX_SERVER_", frozen=True, extra="ignore", hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one")
    ollama_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Second port to listen on, such as 11434, where Ollama's clients look",
    )
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="API key that requests must send; a variable hides it from other users",
    )
    admin_token: SecretStr | None = Field(
        None,
        min_length=8,
        description="Token for /v1/admin; without one, /v1/admin answers only this machine",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File of named API keys, stored as hashes; `mlx-manager key add` writes it",
    )
    open_access: bool = Field(False, description="Serve other machines without any key")
    open_metrics: bool = Field(False, description="Answer /metrics without a key")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Host names that browsers may use for a server without keys, comma-separated",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose web pages may read answers, comma-separated; `*` for all"
    )
    key_requests_per_minute: int | None = Field(
        None, ge=1, description="Requests a minute for each key that has no limit of its own"
    )
    key_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens a minute, prompts and answers, for each key that has no limit of its "
        "own",
    )
    key_max_concurrent: int | None = Field(
        None, ge=1, description="Requests of one key that run at once; further ones wait"
    )
    key_max_queued: int = Field(
        64, ge=0, description="Requests of one key that may wait; further ones get 429"
    )
    model: str = Field(
        DEMO_MODEL,
        min_length=1,
        description="Model that answers requests which name none; loaded at the start",
    )
    available_models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="More models to offer, as Hugging Face ids or folders, comma-separated"
    )
    model_aliases: Annotated[tuple[tuple[str, str], ...], NoDecode] = Field(
        (), description="Names that stand for others, such as `claude-*=mlx-manager/demo,gpt-*=...`"
    )
    models_file: Path | None = Field(
        None, description="TOML file with settings of single models; read again on SIGHUP"
    )
    models_dir: Path | None = Field(None, description="Folder whose sub-folders are models")
    hf_cache: bool = Field(True, description="Offer the models found in the Hugging Face cache")
    allow_download: bool = Field(
        False, description="Download a configured model when a request asks for it"
    )
    max_models: int = Field(4, ge=1, description="Models kept in memory at once")
    model_ttl_seconds: float | None = Field(
        None,
        ge=0,
        description="Seconds without use after which a model is unloaded; 0 is at once; default: "
        "never",
    )
    memory_limit_gb: float | None = Field(
        None,
        gt=0,
        le=MOST,
        allow_inf_nan=False,
        description="Memory for weights and KV pages; default: 90 % of the device's memory, less "
        "what other programs use of an NVIDIA GPU",
    )
    weights: Literal["auto", "keep", "dequantize"] = Field(
        "auto", description="Weights in memory: the fastest form that fits, as stored, or dense"
    )
    wire_weights: bool = Field(
        False,
        description="On a Mac: never page the weights out; macOS may panic, see docs/operations.md",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that a model repository ships"
    )
    max_rows: int = Field(128, ge=1, description="Sequences decoded together, per model")
    max_waiting: int = Field(
        1024, ge=0, description="Requests that may wait for one model; further ones get 429"
    )
    page_size: int = Field(16, ge=1, le=256, description="Tokens in a KV page")
    prefill_chunk: int | None = Field(
        None,
        ge=16,
        description="Most prompt tokens in one step; default 512, on a GPU 2048, or less, or 8192 "
        "where that takes under 80 ms",
    )
    prefix_cache: bool = Field(True, description="Reuse the KV pages of prompts that begin alike")
    max_body_mb: float = Field(
        32, gt=0, le=MOST, allow_inf_nan=False, description="Largest request body accepted"
    )
    max_headers_kb: float = Field(
        64, gt=0, le=MOST, allow_inf_nan=False, description="Largest request headers accepted"
    )
    max_messages: int = Field(4096, ge=1, description="Most messages or items in one conversation")
    max_parts: int = Field(16384, ge=1, description="Most content parts in one conversation")
    max_images: int = Field(64, ge=0, description="Most images in one conversation")
    max_tools: int = Field(1024, ge=0, description="Most tools in one request")
    max_inputs: int = Field(
        2048, ge=1, description="Most texts that one request may have embedded or ranked"
    )
    keepalive_seconds: float = Field(
        10, gt=0, description="Seconds of silence after which a stream gets a keep-alive comment"
    )
    timeout_seconds: float | None = Field(
        None, gt=0, description="Seconds for a whole answer; a request can set a shorter time"
    )
    first_token_timeout_seconds: float | None = Field(
        None, gt=0, description="Seconds until an answer begins; a request can set a shorter time"
    )
    queue_timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds in the queue of a loaded model; a request can set a shorter time",
    )
    websockets: bool = Field(
        True, description="Serve /v1/responses as a WebSocket, too, as Codex asks for it"
    )
    client_timeout_seconds: float = Field(
        60,
        gt=0,
        description="Seconds that a client may take to send its headers, or may neither "
        "send nor read",
    )
    load_timeout_seconds: float = Field(
        300,
        ge=0,
        description="Time a load may go without getting further before it fails; 0 is off",
    )
    drain_seconds: float = Field(
        25,
        allow_inf_nan=False,
        ge=0,
        description="Seconds that running requests get to finish when the server stops",
    )
    watchdog_seconds: float = Field(
        300,
        ge=0,
        description="Seconds without a step, while requests wait, until a model's process is "
        "ended; 0: never",
    )
    keep_awake: bool = Field(
        False, description="Keep a Mac from falling asleep while requests are under way"
    )
    strict_fields: bool = Field(
        False, description="Refuse unknown request fields instead of naming them in a header"
    )
    validation_status: ValidationStatus = Field(
        422, description="Status of a value out of its range in chat and completions"
    )
    reasoning_field: ReasoningField = Field(
        "reasoning_content", description="Field of a chat answer that holds the thinking"
    )
    images_as_text: ImagesAsText = Field(
        "history",
        description="Pictures that a line stands for, where no model sees them: those in tools' "
        "results and before the last answer; none, which refuses them; or all",
    )
    response_store: Path | None = Field(
        None,
        description="File that stores the answers of /v1/responses; default: memory, until the "
        "server ends",
    )
    response_store_mb: float = Field(
        64,
        gt=0,
        le=MOST,
        allow_inf_nan=False,
        description="Size limit of the stored answers; the least recently used are removed",
    )
    response_store_days: float = Field(
        30, gt=0, description="Days without use after which a stored answer is removed"
    )
    audit_log: Path | None = Field(
        None,
        description="File that stores who called which model when; default: memory, until the "
        "server ends",
    )
    audit_log_mb: float = Field(
        64,
        gt=0,
        le=MOST,
        allow_inf_nan=False,
        description="Size limit of the audit log; the oldest calls are removed",
    )
    audit_log_days: float = Field(
        90, gt=0, description="Days after which a call is removed from the audit log"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged"
    )
    log_format: Literal["pretty", "json"] = Field(
        "pretty", description="Lines for people, or one JSON object a line"
    )
    log_prompts: bool = Field(
        False, description="Write every prompt to the log, where others may read it"
    )
    metrics_by_key: bool = Field(
        False, description="Count calls and tokens of each API key in /metrics"
    )
    logfire_enabled: bool = Field(False, description="Send traces to LogFire")
    otlp_endpoint: str | None = Field(
        None,
        pattern="^https?://.+",
        description="Send traces to this OpenTelemetry collector, such as `http://localhost:4318`",
    )

    @field_validator("available_models", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator(*SIZES, mode="before")
    @classmethod
    def _convert_unit(cls, value: object, info: ValidationInfo) -> object:
        """Convert `8GB` or `512 MiB` to the unit that the setting's name ends in."""
        if isinstance(value, str) and (found := WITH_UNIT.fullmatch(value)):
            own = str(info.field_name).rpartition("_")[2]
            return float(found[1]) * UNITS[f"{found[2].lower()}b"] / UNITS[own]
        return value

    @field_validator(*PATHS, mode="before")
    @classmethod
    def _check_path(cls, value: object) -> object:
        if value == "":
            raise ValueError("may not be empty; the current folder is '.'")
        return value

    @field_validator(*PATHS)
    @classmethod
    def _whole_path(cls, path: Path | None) -> Path | None:
        return None if path is None else expanded(path)

    @field_validator("audit_log")
    @classmethod
    def _check_audit_log(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        """Refuse the file of the responses: in one file, responses would count as calls, and calls
        would be removed to make room for them."""
        answers = info.data.get("response_store")
        if path is None or answers is None:
            return path
        if os.path.realpath(path) == os.path.realpath(answers):
            raise ValueError("must be another file than MLX_SERVER_RESPONSE_STORE")
        return path

    @field_validator("model", "available_models")
    @classmethod
    def _check_homes(cls, models: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (models,) if isinstance(models, str) else models:
            if is_folder(name):
                expanded(Path(name))
        return models

    @field_validator("api_key", "admin_token", mode="before")
    @classmethod
    def _plain_secret(cls, value: object) -> object:
        """Remove the line break at the end of a file with the secret. Refuse characters that can't
        be in a header."""
        if not isinstance(value, str):
            return value
        secret = value.strip()
        if not (secret.isascii() and secret.isprintable()):
            raise ValueError("may have ASCII characters only, and no line breaks")
        return secret

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        """Return the host as the system takes it: without the brackets of addresses in URLs."""
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not is_host(host):
            raise ValueError(f"{host!r} is no address, nor the name of a host")
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _check_allowed_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(as_browsers_say, hosts))

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (not scheme or not host or "/" in host):
                raise ValueError(f"{origin!r} is no origin such as https://example.com:8443, nor *")
        return tuple(map(origin_as_browsers_say, origins))

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(name.strip() and model.strip() for name, _, model in pairs):
            raise ValueError("each must be NAME=MODEL, separated by commas")
        return tuple((name.strip(), model.strip()) for name, _, model in pairs)

    @cached_property
    def engine(self) -> EngineLimits:
        return EngineLimits(
            self.max_rows, self.max_waiting, self.page_size, self.prefill_chunk, self.prefix_cache
        )

    @cached_property
    def pool(self) -> PoolLimits:
        limit = None if self.memory_limit_gb is None else int(self.memory_limit_gb * 2**30)
        ttl = math.inf if self.model_ttl_seconds is None else self.model_ttl_seconds
        return PoolLimits(
            self.max_models,
            ttl,
            limit,
            self.weights,
            self.trust_remote_code,
            self.wire_weights,
            self.load_timeout_seconds or None,
        )

    @cached_property
    def catalog(self) -> CatalogSources:
        return CatalogSources(
            self.model,
            self.available_models,
            self.models_file,
            self.models_dir,
            self.hf_cache,
            self.allow_download,
            self.model_aliases,
        )

    @cached_property
    def api(self) -> ApiLimits:
        return ApiLimits(
            int(self.max_body_mb * 2**20),
            self.keepalive_seconds,
            self.client_timeout_seconds,
            self.strict_fields,
            self.validation_status,
            self.reasoning_field,
            self.max_messages,
            self.max_parts,
            self.max_images,
            self.max_tools,
            self.max_inputs,
            self.images_as_text,
        )

    @cached_property
    def access(self) -> AccessRules:
        limits = KeyLimits(
            self.key_requests_per_minute,
            self.key_tokens_per_minute,
            self.key_max_concurrent,
            self.key_max_queued,
        )
        return AccessRules(
            self.host,
            None if self.api_key is None else self.api_key.get_secret_value(),
            self.api_keys_file,
            limits,
            self.open_access,
            self.open_metrics,
            self.cors_origins,
            self.allowed_hosts,
            None if self.admin_token is None else self.admin_token.get_secret_value(),
        )

    @cached_property
    def time(self) -> TimeLimits:
        return TimeLimits(
            self.queue_timeout_seconds, self.first_token_timeout_seconds, self.timeout_seconds
        )

    @cached_property
    def responses(self) -> ResponseLimits:
        return ResponseLimits(
            self.response_store,
            int(self.response_store_mb * 2**20),
            self.response_store_days * 86400,
        )

    @cached_property
    def audit(self) -> AuditLimits:
        return AuditLimits(
            self.audit_log, int(self.audit_log_mb * 2**20), self.audit_log_days * 86400
        )

    @cached_property
    def traces(self) -> TraceTargets:
        return TraceTargets(self.logfire_enabled, self.otlp_endpoint)


def expanded(path: Path) -> Path:
    """Return `path` with the home folder in place of its `~`.

    Raises:
        ValueError: the home folder is unknown.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(
            f"the home folder {path.parts[0]} is unknown: set HOME, or write {path} out"
        ) from None


def is_folder(model: str) -> bool:
    """Return whether the owner's name of a model is a folder, which may be missing, or an id."""
    if model == DEMO_MODEL:
        return False
    # Path.is_dir would raise for a name that is too long.
    return model.startswith(("/", ".", "~")) or os.path.isdir(model)


def doubts(settings: MLXServerSettings, variables: Iterable[str]) -> Iterator[str]:
    """Yield likely typing errors in the settings, and in the names of environment variables."""
    known = {f"MLX_SERVER_{name.upper()}" for name in MLXServerSettings.model_fields}
    for variable in sorted(variables):
        if variable.startswith("MLX_SERVER_") and variable.upper() not in known | NOT_A_SETTING:
            yield f"{variable} is no setting"
    for name in settings.available_models:
        if is_folder(name) and not os.path.isdir(os.path.expanduser(name)):
            yield f"MLX_SERVER_AVAILABLE_MODELS: {name} is no folder"


def __getattr__(name: str) -> MLXServerSettings:
    """Return `config.mlx_server_settings`: the environment's settings, read at first use."""
    if name == "mlx_server_settings":
        settings = MLXServerSettings()
        globals()[name] = settings
        return settings
    raise AttributeError(name)
