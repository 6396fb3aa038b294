"""Settings, parsed once from the environment (`MLX_SERVER_`) into frozen parts for each module."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from pydantic import Field, SecretStr, ValidationInfo, create_model, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlx_manager.mlx_server.address import as_browsers_say, is_host, origin_as_browsers_say
from mlx_manager.mlx_server.settings import (
    PREFIX,
    TABLE,
    Distributed,
    ImagesAsText,
    KVBits,
    ReasoningField,
    Secret,
    Setting,
    Settings,
    Speculation,
)

DEMO_MODEL = Settings.model
DEMO_VISION_MODEL = "mlx-manager/demo-vision"
EMBEDDED = (DEMO_MODEL, DEMO_VISION_MODEL)
# `devices/cpu/blas.py` reads these before there are settings.
NOT_A_SETTING = {"MLX_SERVER_BLAS"}
SIZES = tuple(row.name for row in TABLE.values() if row.is_size)
UNITS = {"kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
WITH_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt])i?b?\s*", re.IGNORECASE)
PATHS = tuple(row.name for row in TABLE.values() if row.kind is Path)


@dataclass(frozen=True, slots=True)
class PrefixDisk:
    """The folder that keeps prefixes. budget: bytes that all its files may take. daily: bytes that
    may be written a day (in UTC); None: no limit."""

    folder: Path
    budget: int
    daily: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one model's engine.

    max_rows: sequences decoded together. max_waiting: requests queued beyond those.
    page_size: tokens a KV page. kv_bits: of a number in it; 16 stands for the model's own
    precision. prefill_chunk: most prompt tokens processed in one step (None: by the device).
    prefix_cache: unreferenced pages stay for reuse. image_cache: bytes of pictures' features that
    are kept for reuse. speculation: whether drafts are tried where that is faster, wherever one is
    found, or never. longest_draft: most tokens of a draft. prefix_disk: where prefixes are kept
    beyond memory; None: nowhere.
    """

    max_rows: int = Settings.max_rows
    max_waiting: int = Settings.max_waiting
    page_size: int = Settings.page_size
    prefill_chunk: int | None = None
    prefix_cache: bool = True
    image_cache: int = int(Settings.image_cache_mb * 2**20)
    speculation: Speculation = Settings.speculation
    longest_draft: int = Settings.draft_tokens
    prefix_disk: PrefixDisk | None = None
    kv_bits: KVBits = Settings.kv_bits


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the model pool, and the ways to load models.

    max_models: models that are loaded at once. memory_limit: bytes of all models together; None: by
    the device. ttl: seconds without use after which a model is unloaded, unless its own settings
    say otherwise. wire_weights: macOS keeps as many bytes in memory as the weights have.
    load_timeout: seconds that a load may go without progress; None: no limit. draft_model: the id
    or folder of a draft model for those that have the same tokenizer. devices: those that a model
    is spread over. silence: seconds without a sign of life after which a process of such a model is
    taken to hang; None: no limit. distributed: what joins those of this machine.
    """

    max_models: int = Settings.max_models
    ttl: float = math.inf
    memory_limit: int | None = None
    weights: Literal["auto", "keep", "dequantize"] = "auto"
    trust_remote_code: bool = False
    wire_weights: bool = False
    load_timeout: float | None = None
    draft_model: str | None = None
    devices: int = Settings.devices
    silence: float | None = None
    distributed: Distributed = Settings.distributed


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

    max_body: int
    keepalive: float
    client_timeout: float
    strict_fields: bool
    validation_status: int
    reasoning_field: ReasoningField
    max_images: int
    images_as_text: ImagesAsText


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one picture. hosts: those that pictures are fetched from. fetch_seconds: time for
    fetching one."""

    max_bytes: int = int(Settings.max_image_mb * 2**20)
    max_pixels: int = int(Settings.max_image_megapixels * 10**6)
    hosts: tuple[str, ...] = ()
    fetch_seconds: float = Settings.image_fetch_seconds


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key; None is no limit.

    max_concurrent: requests under way at once. max_queued: further requests, which wait for their
    turn. priority: the most urgent `priority` that a request may have. own_prefixes: what is kept
    of its prompts is found by its own requests alone.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_queued: int = Settings.key_max_queued
    priority: int | None = None
    own_prefixes: bool = Settings.key_own_prefixes


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Rules for access to the server.

    key: the environment's key. keys_file: file of further keys, hashed. limits: limits of keys that
    have none of their own. open_access: if there are no keys, everybody has access, wherever the
    server listens. allowed_hosts: names of the server, besides addresses and names without a dot.
    admin_token: the token that the admin API demands.
    """

    host: str = Settings.host
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
    """Storage of responses. path: its file; None: in memory. max_age: seconds without use.

    max_bytes: of their texts. max_image_bytes: of their pictures.
    """

    path: Path | None = None
    max_bytes: int = 64 * 2**20
    max_image_bytes: int = 256 * 2**20
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


def _declared(row: Setting) -> tuple[Any, Any]:
    """Return a setting's type and field, as `create_model` takes them."""
    kind = SecretStr if row.kind is Secret else row.kind
    if get_origin(kind) is tuple:
        kind = Annotated[kind, NoDecode]
    return (
        kind | None if row.default is None else kind,
        Field(row.default, description=row.text, **row.bounds),
    )


if TYPE_CHECKING:

    class _Fields(Settings, BaseSettings):
        """The settings as attributes, typed by the table."""
else:
    _Fields = create_model(
        "_Fields", __base__=BaseSettings, **{row.name: _declared(row) for row in TABLE.values()}
    )


class MLXServerSettings(_Fields):
    """Every setting of the server; each is an environment variable `MLX_SERVER_<NAME>`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True
    )

    @field_validator("validation_status", "kv_bits", mode="before")
    @classmethod
    def _read_number(cls, value: object) -> object:
        """Read the digits of an environment variable as the number that they are."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator(
        "available_models", "allowed_hosts", "cors_origins", "image_hosts", mode="before"
    )
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

    @field_validator("image_hosts")
    @classmethod
    def _check_image_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_host_rule, hosts))

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
            self.max_rows,
            self.max_waiting,
            self.page_size,
            self.prefill_chunk,
            self.prefix_cache,
            int(self.image_cache_mb * 2**20),
            self.speculation,
            self.draft_tokens,
            self.prefix_disk if self.prefix_cache else None,
            self.kv_bits,
        )

    @cached_property
    def prefix_disk(self) -> PrefixDisk | None:
        if self.prefix_disk_gb is None:
            return None
        budget = int(self.prefix_disk_gb * 2**30)
        daily = self.prefix_write_gb_per_day
        written = budget if daily is None else int(daily * 2**30)
        return PrefixDisk(self.prefix_folder, budget, written)

    @cached_property
    def prefix_folder(self) -> Path:
        """The folder that prefixes are kept in, if they are."""
        if self.prefix_disk_dir is not None:
            return self.prefix_disk_dir
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(os.path.expanduser(base)) / "mlx-manager" / "prefixes"

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
            self.draft_model,
            self.devices,
            # The server's own limit ends the model, and then names no process.
            self.watchdog_seconds / 2 or None,
            self.distributed,
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
            self.max_images,
            self.images_as_text,
        )

    @cached_property
    def images(self) -> ImageLimits:
        return ImageLimits(
            int(self.max_image_mb * 2**20),
            int(self.max_image_megapixels * 10**6),
            self.image_hosts,
            self.image_fetch_seconds,
        )

    @cached_property
    def access(self) -> AccessRules:
        limits = KeyLimits(
            self.key_requests_per_minute,
            self.key_tokens_per_minute,
            self.key_max_concurrent,
            self.key_max_queued,
            own_prefixes=self.key_own_prefixes,
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
            int(self.response_store_images_mb * 2**20),
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


def _host_rule(rule: str) -> str:
    """Return a rule for hosts (`NAME`, `*.NAME` or `*`, each with `:PORT` or without) as the names
    in URLs are compared with it.

    Raises:
        ValueError: `rule` is none.
    """
    name, colon, port = rule.rpartition(":")
    if not port.isdecimal() or rule.count(":") > 1:
        name, colon, port = rule, "", ""
    if name == "*":
        return rule
    below = "*." if name.startswith("*.") else ""
    return f"{below}{as_browsers_say(name.removeprefix('*.'))}{colon}{port}"


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
    if model in EMBEDDED:
        return False
    # Path.is_dir would raise for a name that is too long.
    return model.startswith(("/", ".", "~")) or os.path.isdir(model)


def doubts(settings: MLXServerSettings, variables: Iterable[str]) -> Iterator[str]:
    """Yield likely typing errors in the settings, and in the names of environment variables; and
    settings that another one leaves without effect."""
    known = {row.variable for row in TABLE.values()}
    for variable in sorted(variables):
        if variable.startswith(PREFIX) and variable.upper() not in known | NOT_A_SETTING:
            yield f"{variable} is no setting"
    for name in settings.available_models:
        if is_folder(name) and not os.path.isdir(os.path.expanduser(name)):
            yield f"MLX_SERVER_AVAILABLE_MODELS: {name} is no folder"
    if settings.prefix_disk_gb is not None and not settings.prefix_cache:
        yield "MLX_SERVER_PREFIX_DISK_GB has no effect, as MLX_SERVER_PREFIX_CACHE is false"
    if settings.prefix_write_gb_per_day is not None and settings.prefix_disk_gb is None:
        yield (
            "MLX_SERVER_PREFIX_WRITE_GB_PER_DAY has no effect, as MLX_SERVER_PREFIX_DISK_GB is not "
            "set"
        )
    if settings.draft_model is not None and settings.speculation == "off":
        yield "MLX_SERVER_DRAFT_MODEL has no effect, as MLX_SERVER_SPECULATION is off"


def __getattr__(name: str) -> MLXServerSettings:
    """Return `config.mlx_server_settings`: the environment's settings, read at first use."""
    if name == "mlx_server_settings":
        settings = MLXServerSettings()
        globals()[name] = settings
        return settings
    raise AttributeError(name)
