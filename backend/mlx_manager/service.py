"""The server as a service of the system: a systemd unit, or a launchd plist.

Settings go into an environment file that only its owner may read, since keys may be among them.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_manager.mlx_server.config import PATHS, expanded, is_folder
from mlx_manager.mlx_server.settings import PREFIX
from mlx_manager.mlx_server.utils.open_files import OPEN_FILES

Kind = Literal["systemd", "launchd"]
UNIT = "mlx-manager.service"
LABEL = "mlx-manager.server"
WRONG_SETTING = 2
"""Exit code of the server where a setting is wrong."""
KEPT_BY = "MLX_MANAGER_KEPT_BY"
"""The variable that tells a server which service manager starts it again when it fails."""
RETRY_SECONDS = 60
"""Seconds between two tries of launchd to start a server that ends at once."""
STOP_MARGIN = 15
"""Seconds beyond the server's own grace before it is killed."""


class InvalidValue(Exception):
    """A setting that no environment file can hold."""


@dataclass(frozen=True, slots=True)
class Service:
    """Server as a service. user: the user it runs as, for a service of the whole system; else None.

    program: the command that serves. stop_seconds: time that the program gets to end.
    """

    kind: Kind
    user: str | None
    program: tuple[str, ...]
    stop_seconds: int
    home: Path

    @property
    def definition_file(self) -> Path:
        match self.kind, self.user:
            case "systemd", None:
                return config_home(self.home) / "systemd" / "user" / UNIT
            case "systemd", _:
                return Path("/etc/systemd/system") / UNIT
            case _, None:
                return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
            case _:
                return Path("/Library/LaunchDaemons") / f"{LABEL}.plist"

    @property
    def environment_file(self) -> Path:
        if self.user is not None:
            return Path("/etc/mlx-manager/service.env")
        return config_home(self.home) / "mlx-manager" / "service.env"

    def definition(self) -> str:
        return self._unit() if self.kind == "systemd" else self._plist()

    def start_commands(self) -> list[list[str]]:
        if self.kind == "systemd":
            control = systemctl(self.user)
            return [
                [*control, "daemon-reload"],
                [*control, "enable", UNIT],
                [*control, "restart", UNIT],
            ]
        return [["launchctl", "bootstrap", self._domain(), str(self.definition_file)]]

    def forget_command(self) -> list[str]:
        """Return the command by which the service manager forgets the service's past.

        systemd, which gives up after some failures, counts anew. launchd, which loads no service
        twice, unloads it. The command fails if there is nothing to forget.
        """
        if self.kind == "systemd":
            return [*systemctl(self.user), "reset-failed", UNIT]
        return self.stop_commands()[0]

    def stop_commands(self) -> list[list[str]]:
        if self.kind == "systemd":
            return [[*systemctl(self.user), "disable", "--now", UNIT]]
        return [["launchctl", "bootout", f"{self._domain()}/{LABEL}"]]

    def state_command(self) -> list[str]:
        if self.kind == "systemd":
            return [*systemctl(self.user), "is-active", UNIT]
        return ["launchctl", "print", f"{self._domain()}/{LABEL}"]

    def ready_command(self) -> list[str]:
        """Return the command that prints the status that a ready server has told systemd."""
        return [*systemctl(self.user), "show", "--property=StatusText", "--value", UNIT]

    def log_command(self) -> str:
        if self.kind == "launchd":
            return f"tail -f {shlex.quote(str(self._log()))}"
        return f"journalctl {'--user ' if self.user is None else ''}-u {UNIT} -f"

    def last_words_command(self) -> list[str]:
        """Return the command that prints the end of systemd's log of the service."""
        own = ["--user"] if self.user is None else []
        return ["journalctl", *own, f"--unit={UNIT}", "--lines=8", "--output=cat", "--no-pager"]

    def _unit(self) -> str:
        system = self.user is not None
        lines = [
            "[Unit]",
            "Description=MLX Manager, an inference server for OpenAI and Anthropic clients",
            *(["Wants=network-online.target", "After=network-online.target"] if system else []),
            "StartLimitIntervalSec=300",
            "StartLimitBurst=5",
            "",
            "[Service]",
            # Started is what has loaded its model, which may take as long as it likes.
            "Type=notify",
            "TimeoutStartSec=infinity",
            f"ExecStart={' '.join(unit_word(word) for word in self.program)}",
            f"EnvironmentFile={unit_path(self.environment_file)}",
            *([f"User={self.user}"] if system else []),
            "Restart=on-failure",
            # A setting is wrong, which another start does not mend.
            f"RestartPreventExitStatus={WRONG_SETTING}",
            "RestartSec=5",
            f"TimeoutStopSec={self.stop_seconds}",
            f"LimitNOFILE={OPEN_FILES}",
            "UMask=0077",
            "NoNewPrivileges=yes",
            *(["PrivateTmp=yes", "ProtectSystem=full"] if system else []),
            "",
            "[Install]",
            f"WantedBy={'multi-user' if system else 'default'}.target",
        ]
        return "\n".join(lines) + "\n"

    def _plist(self) -> str:
        # launchd knows no environment files; the shell reads this one, which is written for it.
        script = f'set -a; . "$0"; exec {" ".join(shell_word(word) for word in self.program)}'
        described: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": ["/bin/sh", "-c", script, str(self.environment_file)],
            "RunAtLoad": True,
            # A server that ran for longer than this is started again at once.
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RETRY_SECONDS,
            # launchd can't tell one exit code from another; see `no_retry`.
            "EnvironmentVariables": {KEPT_BY: "launchd"},
            "ExitTimeOut": self.stop_seconds,
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "Umask": 0o077,
            "ProcessType": "Interactive",
            "StandardOutPath": str(self._log()),
            "StandardErrorPath": str(self._log()),
        }
        if self.user is not None:
            described["UserName"] = self.user
        return plistlib.dumps(described, sort_keys=False).decode()

    def _log(self) -> Path:
        if self.user is None:
            return self.home / "Library" / "Logs" / "mlx-manager.log"
        return Path("/Library/Logs/mlx-manager.log")

    def _domain(self) -> str:
        return f"gui/{os.getuid()}" if self.user is None else "system"


def no_retry(code: object) -> bool:
    """Return whether a program that ends with `code` has to say that it was successful: another
    start does not mend a wrong setting, and launchd starts again whatever was not successful."""
    return code == WRONG_SETTING and os.environ.get(KEPT_BY) == "launchd"


def systemctl(user: str | None) -> list[str]:
    return ["systemctl", "--user"] if user is None else ["systemctl"]


def config_home(home: Path) -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")


def native_kind() -> Kind:
    return "launchd" if sys.platform == "darwin" else "systemd"


def program() -> tuple[str, ...]:
    """Return the command that serves, by absolute paths: a service has hardly any PATH."""
    script = Path(sys.executable).with_name("mlx-manager")
    if script.is_file():
        return (str(script), "serve")
    return (sys.executable, "-P", "-m", "mlx_manager.cli", "serve")


def runs_here(kind: Kind) -> bool:
    """Return whether that service manager runs on this machine, so that its command works."""
    if kind == "launchd":
        return shutil.which("launchctl") is not None
    return Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None


def unit_word(word: str) -> str:
    """Return `word` quoted for ExecStart, where `%` and `$` have a meaning."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[\s\"'\\;]", word) else escaped


def unit_path(path: Path) -> str:
    return str(path).replace("%", "%%")


def shell_word(word: str) -> str:
    return '"' + re.sub(r'(["\\$`])', r"\\\1", word) + '"'


def environment_text(variables: Mapping[str, str]) -> str:
    """`NAME="value"` lines, as both systemd and a shell read them.

    Raises:
        InvalidValue: a value has a line break, which neither can hold.
    """
    lines = ["# Written by `mlx-manager service install`; run it again to change this."]
    for name, value in sorted(variables.items()):
        if "\n" in value or "\r" in value or "\0" in value:
            raise InvalidValue(f"{name} has a line break, which a service's settings can't have.")
        lines.append(f"{name}={shell_word(value)}")
    return "\n".join(lines) + "\n"


def write(file: Path, content: str, mode: int, owner: str | None = None) -> None:
    """Write a file atomically, never readable by more users than `mode` allows.

    Raises:
        OSError: the file can't be written.
        LookupError: there is no such `owner`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as out:
        os.fchmod(out.fileno(), mode)
        out.write(content)
    if owner is not None:
        shutil.chown(new, owner)
    new.replace(file)


def carried(environment: Mapping[str, str], given: Mapping[str, object]) -> dict[str, str]:
    """Return the service's variables: this environment's settings, overridden by the options.

    A service starts in another folder, so paths are made absolute.

    Raises:
        InvalidValue: a path begins in a home folder that is unknown.
    """
    kept = {k: v for k, v in environment.items() if CARRIED.fullmatch(k)}
    told = kept | {f"{PREFIX}{name.upper()}": as_text(v) for name, v in given.items()}
    found = {}
    for name, value in told.items():
        try:
            found[name] = from_anywhere(name, value)
        except ValueError as error:
            raise InvalidValue(f"{name}: {error}.") from None
    return found


def from_anywhere(variable: str, value: str) -> str:
    """Return `value` with its paths made absolute, so that it means the same in any folder."""
    setting = variable.removeprefix(PREFIX).lower()
    if setting in PATHS or PLACE.fullmatch(variable):
        return absolute(value)
    match setting:
        case "model":
            return folder_or_id(value)
        case "available_models":
            return ",".join(folder_or_id(part.strip()) for part in value.split(","))
        case "model_aliases":
            pairs = (part.partition("=") for part in value.split(","))
            return ",".join(f"{name}{sign}{folder_or_id(of.strip())}" for name, sign, of in pairs)
        case "blas" if "/" in value:  # Any other is looked for where the system's libraries are.
            return absolute(value)
        case _:
            return value


def folder_or_id(model: str) -> str:
    return absolute(model) if model and is_folder(model) else model


def absolute(path: str) -> str:
    return str(expanded(Path(path)).absolute())


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with secrets masked: by their names, or URLs with a password."""
    return {
        name: "********"
        if re.search(r"(KEY|TOKEN|SECRET|PASSWORD|HEADERS)$", name) or re.search(r"://.*@", value)
        else value
        for name, value in variables.items()
    }


CARRIED = re.compile(
    r"(MLX_(SERVER|CUDA|MAX|PTX)|HF|OTEL|LOGFIRE)_.+|(OPENBLAS|OMP)_NUM_THREADS"
    r"|(?i:(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)"
)
"""Variables that say how a server runs, as docs/configuration.md has them, and how it reaches the
hub."""
PLACE = re.compile(
    r"(HF|MLX_PTX)_(.+_)?(HOME|CACHE|PATH|DIR)|OTEL_EXPORTER_OTLP_(.+_)?(CERTIFICATE|CLIENT_KEY)"
    r"|SSL_CERT_(FILE|DIR)"
)
"""Names of other variables that hold the path of a folder or file."""


def as_text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ",".join(map(as_text, value))
        case _:
            return str(value)


def shown(commands: Sequence[Sequence[str]]) -> str:
    """Return the commands as lines to paste into a shell."""
    return "\n".join("  " + shlex.join(command) for command in commands)
