"""Requests and answers of `/v1/admin`. Bytes and seconds throughout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlx_manager.mlx_server.schemas.openai import (
    Messages,
    ModelServer,
    ModelWeights,
    TemplateParameters,
)
from mlx_manager.mlx_server.schemas.sampling import CACHE_SALT, CacheSalt
from mlx_manager.mlx_server.schemas.wire import NonEmpty, Wire


class ModelRef(Wire):
    model: NonEmpty = Field(description="An id of `GET /v1/admin/models`, or an alias")


class PinRequest(ModelRef):
    pinned: bool = Field(True, description="False lets it make place again")


class ClearRequest(Wire):
    model: NonEmpty | None = Field(None, description="Of this model; without it, of all")


class AdminPrefixDisk(Wire):
    """Prompts of a model, and features of pictures in them, that are kept on disk.

    queries, hits: prompt tokens that memory did not have and that were looked up on disk, and those
    that were read from there. picture_queries, picture_hits: the same of pictures. read_bytes,
    written_bytes, and dropped, the blocks that were not written: since the model was loaded.
    files_bytes, budget, written_today, daily: of all models together, in bytes; daily is the most
    that may be written in a day (UTC).
    """

    queries: int
    hits: int
    picture_queries: int
    picture_hits: int
    read_bytes: int
    written_bytes: int
    dropped: int
    files_bytes: int
    budget: int
    written_today: int
    daily: int | None


class WarmRequest(TemplateParameters):
    """A prompt that is read ahead: a text, or a conversation."""

    text: NonEmpty | None = Field(None, description="Beginning of raw prompts")
    messages: Messages | None = Field(
        None, description="Beginning of chats, or, if the user's message is the last, a chat"
    )
    cache_salt: CacheSalt | None = Field(None, description=CACHE_SALT)


class WarmedPrefix(Wire):
    """Tokens of a prompt that has been read ahead.

    cached_tokens were known already, and computed_tokens were read. kept_tokens of both are found
    by who begins alike: all but those that fill no page.
    """

    model: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    kept_tokens: int


class AdminDrafts(Wire):
    """tried: tokens that were tried ahead. accepted: those of them that were drawn."""

    tried: int
    accepted: int


class AdminModel(Wire):
    """A model on offer, or loaded.

    ttl_seconds: time without use after which it is unloaded, null for never; idle_seconds: how much
    of it has passed. outdated: its settings changed, and it will be loaded anew once it is idle.
    memory: what it holds, by purpose. kv_format, kv_token_bytes: of keys and values in its pages,
    such as "bfloat16" or "int8/64", numbers of 8 bits with a scale for 64 of them; null if it has
    none. acceptance: the part of the tokens that were tried ahead that was drawn, null if none was
    tried. servers: the other machines that have it; none if it is loaded here. draft_model: what
    guesses some of them, null if it is not loaded; mtp: the model or folder whose MTP head does.
    drafts: tokens that were tried ahead and drawn, by what told them. devices: the number that it
    is spread over, null while it is not loaded. prefix_disk: null where no prompts are kept on
    disk.
    """

    id: str
    state: Literal["loadable", "loading", "loaded", "down"]
    doing: str | None = None
    failure: str | None = None
    origin: str
    family: str
    context_length: int
    bytes: int
    base: str | None
    adapter: str | None
    aliases: list[str]
    pinned: bool
    preload: bool
    ttl_seconds: float | None
    idle_seconds: float | None
    leases: int
    outdated: bool
    weights: ModelWeights | None
    memory: dict[str, int]
    kv_format: str | None
    kv_token_bytes: int | None
    acceptance: float | None
    prefix_disk: AdminPrefixDisk | None
    servers: list[ModelServer]
    draft_model: str | None
    mtp: str | None = None
    drafts: dict[str, AdminDrafts]
    devices: int | None = None


class AdminMemory(Wire):
    """limit: what may be used; available: what nobody has been promised; active, peak: MLX's own
    figures; buffer_cache: freed buffers that it keeps, beyond what steps work on."""

    limit: int
    available: int
    buffer_cache: int
    active: int
    peak: int


class AdminModels(Wire):
    object: Literal["list"] = "list"
    data: list[AdminModel]
    memory: AdminMemory


class UnloadedModel(Wire):
    """unloaded: false if it was not loaded. The rest: its weights, and MLX's active memory before
    and after, measured."""

    id: str
    unloaded: bool
    bytes: int = 0
    memory_before: int = 0
    memory_after: int = 0


class RunningRequest(Wire):
    """A call under way, of one row or several.

    id: of the answer; request_id: the header's. phase: load, queue, prompt or answer. tokens:
    those drawn so far.
    """

    id: str
    request_id: str
    model: str
    protocol: str
    key: str
    state: Literal["waiting", "running"]
    phase: Literal["load", "queue", "prompt", "answer"]
    age_seconds: float
    rows: int
    prompt_tokens: int
    tokens: int


class RunningRequests(Wire):
    object: Literal["list"] = "list"
    data: list[RunningRequest]


class Sample(Wire):
    """Ten seconds with work in them, as `observability.history.Sample`."""

    time: float
    seconds: float
    tokens: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    accepted_tokens: int
    first: tuple[float, float] | None = Field(description="Median and 99th percentile")
    gaps: tuple[float, float] | None = Field(description="Median and 99th percentile")


class RecentCall(Wire):
    """A call that has ended, as `observability.history.RecentCall`."""

    number: int
    ended: float
    request_id: str
    model: str
    protocol: str
    key: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    load: float | None
    queued: float | None
    first: float | None
    seconds: float
    outcome: str
    missed: str = Field(description="Why no more of its prompt was found in the prefix cache")


class Download(Wire):
    """A download of a model from the hub. there: bytes that are here, of `total`."""

    id: int
    model: str
    state: Literal["running", "paused", "done", "failed", "cancelled"]
    there: int
    total: int
    error: str | None


class ServerState(Wire):
    """State of the server, as `/v1/admin/events` streams it.

    time: seconds since 1970. generated_tokens, prompt_tokens: counted since each model was loaded,
    over all that are. samples, calls: those since the event before; in the first one, of the last
    hour, and the last 200.
    """

    time: float
    version: str
    draining: bool
    models: list[AdminModel]
    memory: AdminMemory
    requests: list[RunningRequest]
    downloads: list[Download]
    generated_tokens: int
    prompt_tokens: int
    samples: list[Sample]
    calls: list[RecentCall]


class CancelledRequest(Wire):
    id: str
    cancelled: int = Field(description="Requests of that id that were under way")


class DrainState(Wire):
    """draining: nothing new is taken. running: calls that have not ended. seconds: that they get,
    from the drain's begin on."""

    draining: bool
    running: int
    seconds: float


class ReloadedSettings(Wire):
    """Effects of a reload, as lists of model ids.

    changed: models with new settings. unloaded: idle models, to be loaded anew. outdated: models
    that still answer, to be loaded anew once idle. unknown: models that the file names and nobody
    offers.
    """

    models_file: str | None
    changed: list[str]
    unloaded: list[str]
    outdated: list[str]
    unknown: list[str]


class ClearedPrefixes(Wire):
    freed: dict[str, int] = Field(description="Bytes given back, by model")


class AuditedCall(Wire):
    """A call that has ended, and nothing of what it said.

    time: when it came, in seconds since 1970. answers: how many were asked for. outcome: why they
    ended, each reason once; `cancelled` if the caller left; or the code of the error.
    """

    id: int
    time: float
    request_id: str
    key: str
    model: str
    protocol: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    outcome: str


class AuditedCalls(Wire):
    data: list[AuditedCall]
