"""API keys: how one is made, how it is kept, and whose a secret is.

Secrets are drawn here, 256 random bits each, and only their SHA-256 is kept. A slow hash (argon2,
bcrypt) defends passwords, which can be guessed; nobody guesses 256 bits, however fast the hash, and
a fast one costs a request microseconds. GitHub and others keep their tokens so, for that reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mlx_manager.mlx_server.config import AccessRules, KeyLimits
from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError
from mlx_manager.mlx_server.utils import toml

PREFIX = "sk-mlx-"
"""Prefix by which leaked keys are recognised. Some clients want `sk-` to come first."""

ENVIRONMENT_KEY = "default"
"""The name of the key that MLX_SERVER_API_KEY gives."""

HEADING = "API keys of MLX Manager. Only hashes are here; `mlx-manager key` keeps this file.\n"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
NAMES = "a letter or digit, and up to 63 more of these or of . _ @ -"


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name, the SHA-256 of its secret in hexadecimal, and what it may ask for."""

    name: str
    sha256: str
    limits: KeyLimits = NO_LIMITS


class KeyEntry(BaseModel):
    """A table of the keys' file. Limits that it leaves out are the server's own."""

    model_config = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    created: datetime | None = None
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_concurrent: int | None = Field(None, ge=1)
    max_queued: int | None = Field(None, ge=0)
    priority: int | None = None
    own_prefixes: bool | None = None

    def limits(self, given: KeyLimits) -> KeyLimits:
        own = self.model_dump(exclude={"sha256", "created"}, exclude_none=True)
        return replace(given, **own)


ENTRIES = TypeAdapter(dict[Name, KeyEntry])


def make_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def fingerprint(secret: str) -> str:
    """Return the SHA-256 of a secret, which is all that is kept of it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    """The keys that are known, found by their secrets."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def find(self, secret: str) -> ApiKey | None:
        """Return the key whose secret this is; None if there is none.

        The comparison takes constant time. The duration of the look-up by hash tells something
        about the hash of a guess at most, which brings nobody nearer to a key.
        """
        presented = fingerprint(secret)
        key = self._keys.get(presented)
        return key if key and hmac.compare_digest(key.sha256, presented) else None


def read_keys(rules: AccessRules, *, some: bool = True) -> tuple[ApiKey, ...]:
    """Return the keys of the settings: the environment's, and those of the file.

    some: whether the file must have a key. The last key may be removed while a server runs.

    Raises:
        InvalidSettings: the file can't be read, has no key, has one of the environment key's name,
            one key under two names, or something else in it; says what.
    """
    keys: list[ApiKey] = []
    if rules.key is not None:
        keys.append(ApiKey(ENVIRONMENT_KEY, fingerprint(rules.key), rules.limits))
    if rules.keys_file is not None:
        entries = read_entries(rules.keys_file)
        if some and not entries:
            raise InvalidSettings(
                f"MLX_SERVER_API_KEYS_FILE: there is no key in {rules.keys_file}. "
                f"Make one: mlx-manager key add NAME --file {rules.keys_file}"
            )
        if rules.key is not None and ENVIRONMENT_KEY in entries:
            raise InvalidSettings(
                f"The key of MLX_SERVER_API_KEY is named {ENVIRONMENT_KEY!r}, and so is one in "
                f"{rules.keys_file}: what one has kept, the other would find. Give that one "
                "another name, or leave MLX_SERVER_API_KEY out."
            )
        keys += [
            ApiKey(name, entry.sha256, entry.limits(rules.limits))
            for name, entry in entries.items()
        ]
    names: dict[str, str] = {}
    for key in keys:
        if (other := names.setdefault(key.sha256, key.name)) != key.name:
            raise InvalidSettings(
                f"{rules.keys_file}: {other!r} and {key.name!r} have the same key, so nobody could "
                "tell who calls. Remove one of them."
            )
    return tuple(keys)


def read_entries(file: Path) -> dict[str, KeyEntry]:
    """
    Raises:
        InvalidSettings: it can't be read, or is no keys' file; says where.
    """
    try:
        content = toml.parsed(file.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidSettings(
            f"There is no keys' file {file}. `mlx-manager key add NAME --file {file}` makes one."
        ) from None
    except OSError as error:
        raise InvalidSettings(f"The keys' file {file} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise InvalidSettings(f"The keys' file {file} is not TOML: {error}.") from None
    try:
        return ENTRIES.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise InvalidSettings(f"The keys' file {file}: {where}: {first['msg']}.") from None


def add_key(file: Path, name: str, limits: Mapping[str, int]) -> str:
    """Add a key to a file, which is made if there is none, and return its secret.

    Raises:
        InvalidSettings: the name is none that a key can have, or the file is no keys' file.
        MLXManagerError: it is taken, or the file can't be written.
    """
    import tomlkit

    secret = make_secret()
    entry = {"sha256": fingerprint(secret), "created": datetime.now(UTC).replace(microsecond=0)}
    with _alone(file) as own:
        entries = read_entries(own) if own.exists() else {}
        if name in entries:
            raise MLXManagerError(f"{file} has a key named {name!r} already.")
        check_entry(name, entry | dict(limits))
        document = _open(own)
        table = tomlkit.table()
        table.update(entry | dict(limits))
        document.append(name, table)
        _write(own, tomlkit.dumps(document))
    return secret


def remove_key(file: Path, name: str) -> None:
    """
    Raises:
        InvalidSettings: the file can't be read, or is no keys' file.
        MLXManagerError: there is no such key, or the file can't be written.
    """
    import tomlkit

    if name not in read_entries(file):
        raise MLXManagerError(f"{file} has no key named {name!r}.")
    with _alone(file) as own:
        document = _open(own)
        # Another may have removed it meanwhile.
        document.pop(name, None)
        _write(own, tomlkit.dumps(document))


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """Yield the file behind all links, with its folder locked against other programs like this."""
    file = file.resolve()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(file.parent, os.O_RDONLY)
    except OSError as error:
        raise MLXManagerError(f"{file} can't be written: {error.strerror}.") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(folder)


def check_entry(name: str, entry: Mapping[str, Any]) -> None:
    try:
        ENTRIES.validate_python({name: entry})
    except ValidationError as error:
        first = error.errors()[0]
        if "[key]" in first["loc"]:
            raise InvalidSettings(f"{name!r} can't be a key's name, which is {NAMES}.") from None
        raise MLXManagerError(f"{first['loc'][-1]}: {first['msg']}.") from None


def _open(file: Path) -> Any:
    import tomlkit

    if file.exists():
        return tomlkit.parse(file.read_text("utf-8"))
    document = tomlkit.document()
    document.add(tomlkit.comment(HEADING.strip()))
    return document


def _write(file: Path, text: str) -> None:
    """Replace the file atomically by one that only its owner can read."""
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(file)
    except OSError as error:
        raise MLXManagerError(f"{file} can't be written: {error.strerror}.") from None
