"""The owner's settings of single models, in one TOML file.

    allow = ["mlx-community/*", "support"]      # what may be named; without it, all there is

    [models."mlx-community/Llama-3.2-3B-Instruct-4bit"]
    aliases = ["small", "gpt-4o*"]
    pinned = true
    ttl = "30m"
    sampling = { temperature = 0.7, top_p = 0.9 }

    [models.support]
    base = "mlx-community/Llama-3.2-3B-Instruct-4bit"
    adapter = "adapters/support"

    [models.brief]                              # a preset: its base, asked in another way
    base = "mlx-community/Llama-3.2-3B-Instruct-4bit"
    system = "Answer in one sentence."
    template_args = { enable_thinking = false }
    thinking_budget = 500

    [models.big]                                # a model on another machine
    url = "http://studio:8000/v1"
    key_env = "STUDIO_KEY"

The file is parsed once into frozen dataclasses, by `read_models_file` alone.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails

from mlx_manager.mlx_server.address import as_browsers_say
from mlx_manager.mlx_server.config import expanded
from mlx_manager.mlx_server.core import SAMPLING_DEFAULTS, Kind, Overlay
from mlx_manager.mlx_server.errors import InvalidSettings, ModelLoadFailed
from mlx_manager.mlx_server.limits import (
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.settings import KVBits
from mlx_manager.mlx_server.utils import toml

log = logging.getLogger(__name__)

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
NEVER = math.inf


def _seconds(value: object) -> float:
    match value:
        case "never":
            return NEVER
        case bool():
            pass
        case int() | float() if value >= 0:
            return float(value)
        case str() if found := DURATION.fullmatch(value):
            return float(found[1]) * UNITS[found[2]]
    raise ValueError('must be seconds, a text such as "90s", "30m", "2h" or "1d", or "never"')


def _plain(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("must have no control characters")
    return text


def _filled(path: object) -> object:
    if path == "":
        raise ValueError("must not be empty: the file's own folder is '.'")
    return path


def _beside(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context  # type: ignore[assignment]
    _plain(str(path))
    found = folder / expanded(path)
    try:
        # The load checks that the path exists; this checks that it can be looked up at all.
        found.is_dir()
    except OSError as error:
        raise ValueError(f"must be a path that can be used ({error.strerror})") from error
    return found


def _readable(path: Path, info: ValidationInfo) -> Path:
    found = _beside(path, info)
    try:
        text = found.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"must be a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("must be a file of text in UTF-8") from error
    if not text.strip():
        raise ValueError("must be a file with a text in it")
    return found


def _id_or_folder(name: str, info: ValidationInfo) -> str:
    found = _beside(Path(name), info)
    return str(found) if name.startswith((".", "~")) else name


TextFile = Annotated[Path, BeforeValidator(_filled), AfterValidator(_readable)]


def _address(url: str) -> str:
    """Return an address below which OpenAI's routes are; one that has no path gets `/v1`."""
    try:
        parts = urlsplit(_plain(url))
        as_browsers_say(parts.hostname or "")
        sound = parts.scheme in ("http", "https") and parts.port != 0 and " " not in url
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment:
        raise ValueError("must be an address such as http://studio:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must have no user or password: name the variable of a key in key_env")
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


def _several(urls: object) -> object:
    return (urls,) if isinstance(urls, str) else urls


def _some(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls or len(set(urls)) < len(urls):
        raise ValueError("must be an address, or a list of different ones")
    return urls


def _limited(seconds: float) -> float:
    if not 0 < seconds < NEVER:
        raise ValueError('must be more than 0, and not "never"')
    return seconds


Name = Annotated[str, Field(min_length=1), AfterValidator(_plain)]
Duration = Annotated[float, BeforeValidator(_seconds)]
Address = Annotated[str, Field(strict=True), AfterValidator(_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_several), AfterValidator(_some)]
Switch = Annotated[bool, Field(strict=True)]
AS_TOML_HAS_IT = Field(strict=True)
"""Strict validation: a text or a truth value is no number."""
KNOWN_ONLY = ConfigDict(extra="forbid")
IN_TOML = {
    "bool_type": "must be true or false",
    "dataclass_type": "must be a table",
    "dict_type": "must be a table",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
}
"""Wording in TOML's terms of some of pydantic's errors, by their types."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling for requests that give none; None: the request's protocol decides."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_ONLY

    temperature: Annotated[Temperature, AS_TOML_HAS_IT] | None = None
    top_p: Annotated[TopP, AS_TOML_HAS_IT] | None = None
    top_k: Annotated[TopK, AS_TOML_HAS_IT] | None = None
    min_p: Annotated[MinP, AS_TOML_HAS_IT] | None = None
    presence_penalty: Annotated[Penalty, AS_TOML_HAS_IT] | None = None
    frequency_penalty: Annotated[Penalty, AS_TOML_HAS_IT] | None = None
    repetition_penalty: Annotated[RepetitionPenalty, AS_TOML_HAS_IT] | None = None

    def given(self) -> Mapping[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


_SAMPLING = TypeAdapter(SamplingDefaults)


def makers_sampling(folder: Path) -> Mapping[str, float]:
    """Return the makers' sampling values: generation_config.json as vLLM reads it, that is without
    `do_sample`. Invalid values are left out and logged."""
    file = folder / "generation_config.json"
    try:
        stated = read_json(file) if file.is_file() else {}
    except ModelLoadFailed as error:
        log.warning("%s It is not used.", error)
        return {}
    found: dict[str, float] = {}
    for name in SAMPLING_DEFAULTS & {name for name, value in stated.items() if value is not None}:
        try:
            found |= _SAMPLING.validate_python({name: stated[name]}).given()
        except ValidationError as error:
            wrong = error.errors()[0]["msg"]
            log.warning("%s: %s %r is not used: %s", file, name, stated[name], wrong)
    return found


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that a model is loaded by: if one changes, the model must be loaded again.

    base: the id or folder of its weights; None: its own name. adapter: a folder in mlx-lm's format.
    context_length: a lower limit than the model's own. draft_model: the id or folder of a model
    that drafts for it. mtp: whether its MTP head drafts for it, or the id or folder of what has the
    head. hostfile: the machines that it is spread over, in the form of `mlx.launch`'s. weights,
    draft_model, devices, kv_bits: None: the server's setting.
    """

    base: str | None = None
    adapter: Path | None = None
    context_length: int | None = None
    weights: Literal["auto", "keep", "dequantize"] | None = None
    draft_model: str | None = None
    devices: int | None = None
    hostfile: Path | None = None
    kv_bits: KVBits | None = None
    mtp: str = "auto"

    @property
    def head(self) -> str | None:
        """Return the id or folder of what has the MTP head; None if the setting names none."""
        return None if self.mtp in ("auto", "off") else self.mtp


AS_IT_IS = Recipe()


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model's table. ttl: seconds without use until it is unloaded; None: the server's setting.
    warm: files with system messages that are read when the model is loaded.

    The first nine settings make up its `recipe`. A name with a base and without an adapter, a form
    of weights, KV bits, a draft model, an MTP head or devices of its own is a preset: it shares the
    base's engine, KV pages and prefix cache, and its table applies to the requests that name it.

    url: addresses of servers on other machines that have the model. key_env: the environment's
    variable with the key for them. remote_model: the model's name there. kind: its purpose, where
    they don't tell. timeout: the most seconds without a byte of an answer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_ONLY

    base: Annotated[Name, AfterValidator(_id_or_folder)] | None = None
    adapter: Annotated[Path, BeforeValidator(_filled), AfterValidator(_beside)] | None = None
    context_length: Annotated[int, Field(strict=True, ge=1)] | None = None
    weights: Literal["auto", "keep", "dequantize"] | None = None
    draft_model: Annotated[Name, AfterValidator(_id_or_folder)] | None = None
    devices: Annotated[int, Field(strict=True, ge=1)] | None = None
    hostfile: Annotated[Path, BeforeValidator(_filled), AfterValidator(_beside)] | None = None
    kv_bits: KVBits | None = None
    mtp: Annotated[Name, AfterValidator(_id_or_folder)] = "auto"
    aliases: tuple[Name, ...] = ()
    pinned: Switch = False
    preload: Switch = False
    ttl: Duration | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    system: Annotated[str, Field(strict=True)] | None = None
    template_args: Mapping[Name, Any] = field(default_factory=dict)
    thinking_budget: Annotated[int, Field(strict=True, ge=0)] | None = None
    speculation: Literal["auto", "off"] | None = None
    warm: tuple[TextFile, ...] = ()
    url: Addresses | None = None
    key_env: Annotated[Name, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    remote_model: Name | None = None
    kind: Kind | None = None
    timeout: Annotated[Duration, AfterValidator(_limited)] | None = None

    @property
    def is_preset(self) -> bool:
        own = (
            self.adapter,
            self.weights,
            self.draft_model,
            self.devices,
            self.hostfile,
            self.kv_bits,
        )
        plain = all(each is None for each in own) and self.mtp == "auto"
        return self.base is not None and plain

    @property
    def overlay(self) -> Overlay:
        """Return the changes to requests; only a preset's limit of the context is among them."""
        return Overlay(
            self.system,
            self.template_args,
            self.thinking_budget,
            self.context_length if self.is_preset else None,
            self.speculation,
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            self.base,
            self.adapter,
            self.context_length,
            self.weights,
            self.draft_model,
            self.devices,
            self.hostfile,
            self.kv_bits,
            self.mtp,
        )


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The whole file. allow: patterns of the ids on offer; None: all that the catalog finds."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_ONLY

    allow: tuple[Name, ...] | None = None
    models: Mapping[Name, ModelSettings] = field(default_factory=dict)

    def of(self, model_id: str) -> ModelSettings:
        return self.models.get(model_id, PLAIN)

    def allows(self, model_id: str) -> bool:
        return self.allow is None or any(fnmatchcase(model_id, name) for name in self.allow)

    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Return patterns of names, each with the id it stands for, in the file's order."""
        return tuple(
            (alias, model) for model, settings in self.models.items() for alias in settings.aliases
        )


@dataclass(eq=False, slots=True)
class Wishes:
    """The settings in force, and the pins and TTLs that were set since the start, which override
    them.

    The wishes outlive a pool: the next one is given them.
    """

    models: ModelsFile
    pins: dict[str, bool] = field(default_factory=dict)
    ttls: dict[str, float] = field(default_factory=dict)


PLAIN = ModelSettings()
_FILE = TypeAdapter(ModelsFile)


def read_models_file(path: Path | None) -> ModelsFile:
    """Return the file's settings; without a file, none.

    Relative paths in the file start in its folder.

    Raises:
        InvalidSettings: the file can't be read, or a setting is invalid; the message names file,
            key and what is allowed.
    """
    if path is None:
        return ModelsFile()
    try:
        content = toml.parsed(path.read_text(encoding="utf-8"))
        found = _FILE.validate_python(content, context=path.absolute().parent)
    except OSError as error:
        raise InvalidSettings(f"{path} can't be read: {error.strerror}.") from error
    except ValidationError as error:
        problems = "; ".join(_sentence(problem) for problem in error.errors(include_url=False))
        raise InvalidSettings(f"{path}: {problems}.") from None
    except ValueError as error:
        raise InvalidSettings(f"{path} is not TOML: {error}.") from error
    _check_aliases(path, found)
    _check_places(path, found)
    return found


def _check_aliases(path: Path, found: ModelsFile) -> None:
    owners: dict[str, str] = {}
    for alias, model in found.aliases():
        other = owners.setdefault(alias, model)
        if other != model or (alias in found.models and alias != model):
            taken = f"stands for {other!r} already" if other != model else "is a model's own name"
            raise InvalidSettings(
                f"{path}: {_key(('models', model, 'aliases'))}: {alias!r} {taken}."
            )


HERE_ONLY: tuple[str, ...] = (
    "base",
    "adapter",
    "context_length",
    "weights",
    "pinned",
    "preload",
    "ttl",
    "warm",
    "draft_model",
    "devices",
    "hostfile",
    "kv_bits",
    "mtp",
)
"""Settings of models that are loaded here."""
ELSEWHERE_ONLY: tuple[str, ...] = ("key_env", "remote_model", "kind", "timeout")
"""Settings of models on other machines."""


def _check_places(path: Path, found: ModelsFile) -> None:
    """
    Raises:
        InvalidSettings: a setting does not go with the place where its model is.
    """
    for name, own in found.models.items():
        if own.draft_model is not None and own.recipe.head is not None:
            key = _key(("models", name, "mtp"))
            raise InvalidSettings(
                f"{path}: {key} names an MTP head beside a `draft_model`; one of them can draft."
            )
        base = found.of(own.base) if own.base is not None else PLAIN
        if own.url is not None:
            wrong, why = (
                HERE_ONLY,
                "is for models that are loaded here, and `url` is on another machine",
            )
        elif base.url is not None:
            wrong = (*ELSEWHERE_ONLY, *HERE_ONLY[1:])
            why = f"can't be applied to {own.base!r}, which is on another machine"
        else:
            wrong, why = ELSEWHERE_ONLY, "goes with `url`, which is not set"
        for setting in wrong:
            if getattr(own, setting) != getattr(PLAIN, setting):
                key = _key(("models", name, setting))
                raise InvalidSettings(f"{path}: {key} {why}.")


def _sentence(problem: ErrorDetails) -> str:
    location = problem["loc"]
    if problem["type"] == "unexpected_keyword_argument":
        return f"{_key(location)} is no setting; allowed are {', '.join(_allowed(location))}"
    said = problem["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    rule = IN_TOML.get(problem["type"], said)
    given = problem["input"]
    shown = f", not {given!r}" if isinstance(given, str | int | float) else ""
    return f"{_key(location)}: {rule}{shown}"


def _key(location: Sequence[int | str]) -> str:
    """Return a location as a TOML key, such as `models."a/b".sampling.top_p`."""
    plain = re.compile(r"[\w-]+")
    steps = (str(step) for step in location if step != "[key]")
    return ".".join(
        step if plain.fullmatch(step) else json.dumps(step, ensure_ascii=False) for step in steps
    )


def _allowed(location: Sequence[int | str]) -> list[str]:
    match location:
        case ("models", _, "sampling", _):
            kind: type[Any] = SamplingDefaults
        case ("models", _, _):
            kind = ModelSettings
        case _:
            kind = ModelsFile
    return [each.name for each in fields(kind)]


@dataclass(frozen=True, slots=True)
class SettingsWritten:
    """A change of the owner's file. lines: the difference, in diff's form; none if there is
    none."""

    file: Path
    lines: tuple[str, ...]


def table_of(path: Path | None, model_id: str) -> dict[str, Any]:
    """Return a model's table in the owner's file as it is written; {} if it has none.

    Raises:
        InvalidSettings: the file can't be read.
    """
    if path is None or not path.exists():
        return {}
    read_models_file(path)
    found = toml.parsed(path.read_text(encoding="utf-8")).get("models", {}).get(model_id, {})
    assert isinstance(found, dict)
    return found


def write_settings(
    path: Path | None, model_id: str, settings: Mapping[str, Any], *, dry_run: bool = False
) -> SettingsWritten:
    """Set a model's table in the owner's file, all else of which stays as it is written; without
    settings the table goes. A dry run only tells the difference.

    Raises:
        InvalidSettings: there is no file, a setting is invalid, or the file can't be written. The
            file stays as it is.
    """
    if path is None:
        raise InvalidSettings(
            "There is no file for settings of single models: set MLX_SERVER_MODELS_FILE."
        )
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    after = _with_table(before, model_id, settings)
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(after, encoding="utf-8")
        try:
            read_models_file(new)
        except InvalidSettings as error:
            raise InvalidSettings(error.message.replace(str(new), str(path))) from None
        if not dry_run:
            if path.exists():
                shutil.copymode(path, new)
            new.replace(path.resolve())
    except OSError as error:
        raise InvalidSettings(f"{path} can't be written: {error.strerror}.") from error
    finally:
        new.unlink(missing_ok=True)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return SettingsWritten(path, tuple(list(lines)[2:]))


def _with_table(text: str, model_id: str, settings: Mapping[str, Any]) -> str:
    import tomlkit

    try:
        document = tomlkit.parse(text)
        models = document.setdefault("models", tomlkit.table(is_super_table=True))
        table = models.get(model_id)
        if not settings:
            models.pop(model_id, None)
        else:
            if table is None:
                models[model_id] = table = tomlkit.table()
            for name in [name for name in table if name not in settings]:
                del table[name]
            for name, value in settings.items():
                if table.get(name) != value:
                    table[name] = value
        return tomlkit.dumps(document)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidSettings(f"That can't be written as TOML: {error}.") from error
