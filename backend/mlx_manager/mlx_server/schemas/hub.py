"""Requests and answers of `/v1/admin/hub` and of the models' settings. Bytes throughout."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mlx_manager.mlx_server.schemas.admin import Download, ModelRef, ReloadedSettings
from mlx_manager.mlx_server.schemas.wire import Wire


class FoundModel(Wire):
    """A model on the hub, as its search lists it. here: it has been downloaded."""

    id: str
    downloads: int
    likes: int
    licence: str | None
    gated: bool
    updated: str | None
    here: bool


class FoundModels(Wire):
    data: list[FoundModel]


class ModelPlan(Wire):
    """Memory and disk that a model would take on this machine.

    bytes: of its files. to_download: those that are not here. free_disk: on the cache's disk.
    weights: bytes of its weights. token_bytes: of one token's keys and values; None: its config
    does not tell. limit: memory that models may take. fits: the weights do. rows_at_context: rows
    that are as long as the context and fit beside the weights; None: not known.
    """

    id: str
    licence: str | None
    gated: bool
    model_type: str | None
    supported: bool
    bytes: int
    to_download: int
    free_disk: int
    weights: int
    context_length: int | None
    token_bytes: int | None
    limit: int
    fits: bool
    tokens: int | None = Field(description="Tokens of all rows together that fit")
    rows_at_context: int | None


class DownloadList(Wire):
    data: list[Download]


class ModelSettingsText(Wire):
    """The owner's settings of one model. file: where they are. settings: the model's table."""

    file: str | None
    model: str
    settings: dict[str, Any]


class SettingsChange(ModelRef):
    settings: dict[str, Any] = Field(
        description="The model's whole table in the models' file; empty removes it"
    )
    dry_run: bool = Field(False, description="Only tell what would change")


class ChangedSettings(Wire):
    """lines: the difference to the file as it was, in diff's form. reload: its effects; None for a
    dry run."""

    file: str
    lines: list[str]
    reload: ReloadedSettings | None


__all__ = ["ChangedSettings", "Download", "DownloadList", "FoundModel", "FoundModels", "ModelPlan"]
