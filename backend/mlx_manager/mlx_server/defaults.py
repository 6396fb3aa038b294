"""Values for what a request leaves open: those of a model's owner, and those of its makers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlx_manager.mlx_server.core import (
    SAMPLING_DEFAULTS,
    Conversation,
    GenerationRequest,
    Message,
    Overlay,
    Prompt,
    Sampling,
)


def asked_sampling(**fields: Any) -> Sampling:
    """Return the sampling of a request; fields that are None are left open."""
    given = {name: value for name, value in fields.items() if value is not None}
    return Sampling(**given, silent=SAMPLING_DEFAULTS - given.keys())


def fill_sampling(sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Return the sampling with `defaults` in the fields that are open, and close these."""
    wanted: dict[str, Any] = {n: value for n, value in defaults.items() if n in sampling.silent}
    return replace(sampling, **wanted, silent=sampling.silent - wanted.keys())


def overlaid_prompt(prompt: Prompt, overlay: Overlay) -> Prompt:
    """Return the prompt with the owner's system text and arguments of the template."""
    if not isinstance(prompt, Conversation) or not (overlay.system or overlay.template_args):
        return prompt
    messages = prompt.messages
    if overlay.system:
        messages = (Message("system", overlay.system), *messages)
    arguments = {**overlay.template_args, **prompt.template_args}
    return replace(prompt, messages=messages, template_args=arguments)


def overlaid(request: GenerationRequest, prompt: Prompt, overlay: Overlay) -> GenerationRequest:
    """Return the request with `prompt`, the owner's defaults and limit of the context."""
    budget = request.thinking_budget
    return replace(
        request,
        prompt=prompt,
        thinking_budget=overlay.thinking_budget if budget is None else budget,
        context_length=overlay.context_length,
        speculation=request.speculation or overlay.speculation,
    )
