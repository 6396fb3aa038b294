"""Checks of `mlx-manager doctor`: can this machine serve, and what would make it faster."""

from __future__ import annotations

import os
import platform
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlx_manager import __version__
from mlx_manager.mlx_server.address import url_of
from mlx_manager.mlx_server.config import MLXServerSettings, doubts, expanded
from mlx_manager.mlx_server.settings import TABLE
from mlx_manager.mlx_server.utils.text import sized

INSTALL_MLX = (
    "On Linux, MLX comes in builds: pip install 'mlx[cpu]' scipy-openblas32, or 'mlx[cuda13]'"
)
KERNELS_FAILED = "Slower than it could be; the GPU's own kernels failed their check:"
LITTLE_ROOM = 5e9
FEW_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` false: `serve` can't start. `advice`: what would be better."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


def examine(settings: MLXServerSettings) -> list[Finding]:
    """Everything that is worth knowing before `serve`, for these settings."""
    return [
        Finding("mlx-manager", f"{__version__}, in {sys.prefix}"),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *mlx_findings(settings),
        pictures_finding(),
        *disk_findings(settings),
        *store_findings(settings),
        open_files_finding(),
        *setting_findings(settings),
        *owner_findings(settings),
        *model_findings(settings),
        port_finding(settings.host, settings.port),
    ]


def mlx_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """MLX, its device, memory and BLAS; or why it can't be imported."""
    try:
        from mlx_manager.mlx_server.utils import memory
    except ImportError as error:
        yield Finding("mlx", f"can't be imported: {error}", False, INSTALL_MLX)
        return
    from mlx_manager.mlx_server.devices.cpu.blas import HOW_TO_GET_ONE, load_fast_blas
    from mlx_manager.mlx_server.devices.cuda.graphs import keep_kernels
    from mlx_manager.mlx_server.devices.report import draw_report, kernel_report

    yield Finding("mlx", f"{installed('mlx')}, with mlx-lm {installed('mlx-lm')}")
    yield Finding("device", memory.device_name())
    total = memory.device_memory() / 2**30
    limit = (settings.pool.memory_limit or memory.default_limit()) / 2**30
    others = memory.taken_by_others() / 2**30
    besides = f", {others:.1f} of them in use already" if others else ""
    room = f"models and KV pages may take {limit:.1f} GiB"
    yield Finding("memory", f"{total:.1f} GiB{besides}; {room}")
    blas = load_fast_blas()
    slow = blas.name.startswith("reference")
    yield Finding("blas", f"{blas.name} ({blas.reason})", advice=HOW_TO_GET_ONE if slow else "")
    # As the server has them compiled.
    keep_kernels()
    for name, kernels in (("kernels", kernel_report()), ("sampling", draw_report())):
        advice = f"{KERNELS_FAILED} {kernels.problem}" if kernels.problem else ""
        yield Finding(name, kernels.name, advice=advice)


def pictures_finding() -> Finding:
    """Return whether models that see can be given pictures."""
    from mlx_manager.mlx_server.models.modalities import INSTALL, missing_libraries

    if absent := missing_libraries():
        value = f"models take none: {' and '.join(absent)} is not installed"
        return Finding("pictures", value, advice=INSTALL)
    with_what = f"by mlx-vlm {installed('mlx-vlm')} and Pillow {installed('pillow')}"
    return Finding("pictures", f"models that see are given them {with_what}")


def disk_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """Room where models are kept."""
    from mlx_manager.mlx_server.models.hub import cache_folder, free_bytes, why_closed

    places = {"HF_HOME": cache_folder(), "MLX_SERVER_MODELS_DIR": settings.models_dir}
    for variable, place in places.items():
        if place is None:
            continue
        try:
            folder = expanded(place)
        except ValueError as error:
            yield Finding(
                "disk", f"{place}: {error}", advice=f"Say where models are with {variable}"
            )
            continue
        if reason := why_closed(folder):
            advice = f"Its models are not offered. Make it yours, or move it with {variable}"
            yield Finding("disk", f"{folder}: {reason}", advice=advice)
            continue
        free = free_bytes(folder)
        roomy = free >= LITTLE_ROOM
        advice = "" if roomy else f"Few models fit. Make room, or move it with {variable}"
        yield Finding("disk", f"{sized(free)} free for models in {folder}", advice=advice)


def store_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """Yield whether the files to keep data in can be used; without them a server does not start."""
    files = {
        "MLX_SERVER_RESPONSE_STORE": settings.response_store,
        "MLX_SERVER_AUDIT_LOG": settings.audit_log,
    }
    for variable, file in files.items():
        if file is None:
            continue
        problem = why_not_kept(file)
        value = f"{variable}: {file} can't be used: {problem}" if problem else f"{file}"
        yield Finding("files", value, not problem)


def why_not_kept(file: Path) -> str:
    """Return why no database can be at `file`, or "".

    Creates none: it would belong to the user who runs the check.
    """
    if not os.path.exists(file):
        if not os.path.isdir(file.parent):
            return f"{file.parent} is no folder"
        writable = os.access(file.parent, os.W_OK | os.X_OK)
        return "" if writable else f"{file.parent} is not yours to write to"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as found:
            found.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as error:
        return str(error)
    return ""


def open_files_finding() -> Finding:
    """Each connection is an open file; `serve` raises its limit as far as it may."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    advice = "" if limit >= FEW_FILES else "More connections than that are turned away: ulimit -n"
    return Finding("open files", f"{limit:,}", advice=advice)


def setting_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """The settings that differ from the defaults, and what looks like a typing error."""
    changed = {
        name: getattr(settings, name)
        for name, row in TABLE.items()
        if getattr(settings, name) != row.default
    }
    if changed:
        yield Finding("settings", ", ".join(f"{name}={value}" for name, value in changed.items()))
    for doubt in doubts(settings, os.environ):
        yield Finding("settings", doubt, advice="Look for a typing error")


def owner_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """Yield findings on the owner's settings of keys and models, read as `serve` would."""
    from mlx_manager.mlx_server.api.auth import check_bind
    from mlx_manager.mlx_server.errors import InvalidSettings
    from mlx_manager.mlx_server.models.catalog import check_models_dir
    from mlx_manager.mlx_server.models.settings import read_models_file
    from mlx_manager.mlx_server.services.keys import read_keys

    try:
        check_bind(settings.access)
        names = [key.name for key in read_keys(settings.access)]
        yield Finding("keys", ", ".join(names) if names else "none: nobody is asked for one")
    except InvalidSettings as error:
        yield Finding("keys", error.message, False)
    try:
        check_models_dir(settings.models_dir)
    except InvalidSettings as error:
        yield Finding("models", error.message, False)
    if settings.models_file is not None:
        try:
            names = list(read_models_file(settings.models_file).models)
            yield Finding("models", ", ".join(names) or f"nothing in {settings.models_file}")
        except InvalidSettings as error:
            yield Finding("models", error.message, False)


def model_findings(settings: MLXServerSettings) -> Iterator[Finding]:
    """Yield whether the default model can be served, as far as its files tell."""
    from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError
    from mlx_manager.mlx_server.models.catalog import Catalog
    from mlx_manager.mlx_server.models.settings import ModelSettings, read_models_file

    try:
        from mlx_manager.mlx_server.encoders.loading import checked_encoder
        from mlx_manager.mlx_server.models.loading.load import check_room, checked_text
        from mlx_manager.mlx_server.utils.broken import explained
        from mlx_manager.mlx_server.utils.memory import Ledger, default_limit

        owners = read_models_file(settings.models_file)
    except (ImportError, InvalidSettings):
        return  # Others' findings, which say so.
    source = Catalog(settings.catalog, owners).find(settings.model)
    if source.urls:
        yield Finding("model", f"{source.id} is on another machine: {', '.join(source.urls)}")
        return
    if source.path is None:
        yield Finding("model", f"{source.id} is not here yet: `serve` downloads it first")
        return
    recipe = owners.models.get(source.id, ModelSettings()).recipe
    try:
        with explained(source.id):
            encodes = source.kind in ("embedding", "reranker")
            checked = (
                checked_encoder(source, recipe)
                if encodes
                else checked_text(source, settings.pool, recipe)
            )
            limit = settings.pool.memory_limit or default_limit()
            check_room(source.id, checked.nbytes, Ledger(limit))
    except MLXManagerError as error:
        yield Finding("model", f"{settings.model} can't be served: {error.message}", False)
    else:
        yield Finding("model", f"{source.id}, in {source.path}")


def port_finding(host: str, port: int) -> Finding:
    """Return whether `serve` could listen on `host` and `port`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if found := our_server(host, port):
                advice = "`mlx-manager ps` shows what it does; a second one takes another --port"
                return Finding("port", f"{host}:{port}: {found} runs here", False, advice)
            advice = "Choose another with --host and --port, or end the program that has it"
            return Finding("port", f"{host}:{port}: {error.strerror}", False, advice)
    return Finding("port", f"{host}:{port} is free")


def our_server(host: str, port: int) -> str:
    """Return name and version of our server on that port; "" if another program listens."""
    import httpx

    try:
        health = httpx.get(f"{url_of(host, port)}/health", timeout=2, trust_env=False)
        return f"MLX Manager {health.json()['version']}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return ""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
