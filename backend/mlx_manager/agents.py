"""Coding agents that are started against a server: what each must be told, and in which way.

An agent gets a profile of its own, so that the user's files of that agent stay as they are. What an
agent reads from its environment is preferred to files, and files to options.

Sources: the agents' own documentation (Claude Code's settings, Codex's config.toml, OpenCode's and
Crush's configuration schemas, goose's environment variables, aider's options, qwen-code's
OpenAI authentication, Cline's command line).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_KEY = "none"
"""Key that is sent to a server that asks for none: agents insist on one."""
LEAST_ANSWER = 1024
LARGEST_ANSWER = 32_000


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, and the folder of the agent's profile.

    url: without `/v1`. context_length: in tokens. sees: the model reads pictures.
    """

    url: str
    key: str
    model: str
    context_length: int
    profile: Path
    sees: bool = False

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """Return the most tokens of one answer: a quarter of the context, within reason."""
        return max(LEAST_ANSWER, min(LARGEST_ANSWER, self.context_length // 4))


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, its environment beyond the user's, and the files of the profile that it reads.

    before: commands that are run first, once each time.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    before: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its program, how it is installed, and how it is launched."""

    program: str
    install: str
    launch: Callable[[Target], Launch]


def _claude(target: Target) -> Launch:
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
        *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")),
    )
    # What auto mode, its default, asks before it acts is answered by Anthropic's servers alone.
    settings = json.dumps({"disableAutoMode": "disable"})
    return Launch(
        ("claude", "--settings", settings),
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **dict.fromkeys(models, target.model),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.answer),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context_length),
            "CLAUDE_CONFIG_DIR": str(target.profile),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    )


def _codex(target: Target) -> Launch:
    def text(value: str) -> str:
        return json.dumps(value)  # A TOML string is written as JSON's.

    config = "\n".join(
        [
            f"model = {text(target.model)}",
            'model_provider = "mlx-manager"',
            f"model_context_window = {target.context_length}",
            f"model_auto_compact_token_limit = {target.context_length * 3 // 4}",
            "",
            "[model_providers.mlx-manager]",
            'name = "MLX Manager"',
            f"base_url = {text(target.api)}",
            'wire_api = "responses"',
            'env_key = "MLX_MANAGER_API_KEY"',
            "",
        ]
    )
    return Launch(
        ("codex",),
        {"CODEX_HOME": str(target.profile), "MLX_MANAGER_API_KEY": target.key},
        {target.profile / "config.toml": config},
    )


def _opencode(target: Target) -> Launch:
    limit = {"context": target.context_length, "output": target.answer}
    model: dict[str, Any] = {"name": target.model, "limit": limit}
    if target.sees:
        model |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "mlx-manager": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "MLX Manager",
                "options": {"baseURL": target.api, "apiKey": target.key},
                "models": {target.model: model},
            }
        },
        "model": f"mlx-manager/{target.model}",
        "small_model": f"mlx-manager/{target.model}",
        "autoupdate": False,
        "share": "disabled",
    }
    file = target.profile / "opencode.json"
    return Launch(
        ("opencode",),
        {
            "OPENCODE_CONFIG": str(file),
            "XDG_DATA_HOME": str(target.profile / "data"),
            "XDG_STATE_HOME": str(target.profile / "state"),
        },
        {file: json.dumps(config, indent=2)},
    )


def _qwen(target: Target) -> Launch:
    return Launch(
        ("qwen", "--auth-type", "openai"),
        {
            "OPENAI_BASE_URL": target.api,
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
            "QWEN_HOME": str(target.profile),
        },
    )


def _aider(target: Target) -> Launch:
    name = f"openai/{target.model}"
    facts = {
        name: {
            "max_input_tokens": target.context_length,
            "max_output_tokens": target.answer,
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_vision": target.sees,
        }
    }
    file = target.profile / "models.json"
    return Launch(
        ("aider", "--model", name, "--weak-model", name, "--model-metadata-file", str(file),
         "--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
        {"OPENAI_API_BASE": target.api, "OPENAI_API_KEY": target.key},
        {file: json.dumps(facts, indent=2)},
    )  # fmt: skip


def _goose(target: Target) -> Launch:
    return Launch(
        ("goose",),
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "GOOSE_CONTEXT_LIMIT": str(target.context_length),
            "GOOSE_MAX_TOKENS": str(target.answer),
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_PATH_ROOT": str(target.profile),
            "OPENAI_HOST": target.url,
            "OPENAI_API_KEY": target.key,
        },
    )


def _crush(target: Target) -> Launch:
    model = {
        "id": target.model,
        "name": target.model,
        "context_window": target.context_length,
        "default_max_tokens": target.answer,
        "supports_attachments": target.sees,
    }
    chosen = {"provider": "mlx-manager", "model": target.model}
    config = {
        "$schema": "https://charm.land/crush.json",
        "providers": {
            "mlx-manager": {
                "type": "openai-compat",
                "name": "MLX Manager",
                "base_url": target.api,
                "api_key": target.key,
                "models": [model],
            }
        },
        "models": {"large": chosen, "small": chosen},
        "options": {"disable_provider_auto_update": True, "disable_metrics": True},
    }
    return Launch(
        ("crush", "--data-dir", str(target.profile / "data")),
        {"CRUSH_GLOBAL_CONFIG": str(target.profile), "CRUSH_GLOBAL_DATA": str(target.profile)},
        {target.profile / "crush.json": json.dumps(config, indent=2)},
    )


def _cline(target: Target) -> Launch:
    given = ("--provider", "openai", "--apikey", target.key, "--modelid", target.model)
    return Launch(
        ("cline",),
        {"CLINE_DIR": str(target.profile)},
        before=(("cline", "auth", *given, "--baseurl", target.api),),
    )


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Agent("aider", "pip install aider-chat", _aider),
    "goose": Agent("goose", "see https://block.github.io/goose", _goose),
    "crush": Agent("crush", "npm install -g @charmland/crush", _crush),
    "cline": Agent("cline", "npm install -g cline", _cline),
}


def profile_folder(name: str) -> Path:
    """Return the folder of an agent's own profile."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "mlx-manager" / "agents" / name


def write_profile(target: Target, launch: Launch) -> None:
    """Write the files that the agent reads, for their owner's eyes only.

    Raises:
        OSError: a file can't be written.
    """
    target.profile.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file, text in launch.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
