"""Construction of mlx-lm's module from a model's folder, with its weights not yet read.

mlx-lm's `load_model` takes every file of a folder whose name fits a pattern, and config.json
unchanged. So it is given a folder with neither (`blank`), the config in the form that its classes
read, and the tensors of the files that hold the model's weights.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.architectures import architecture, with_known_names
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.heads import Heads, is_head
from mlx_manager.mlx_server.models.checkpoint.language import language_classes, with_whole_text
from mlx_manager.mlx_server.models.checkpoint.mtp import head_tensors
from mlx_manager.mlx_server.models.checkpoint.renamed import with_old_names
from mlx_manager.mlx_server.models.checkpoint.rope import in_all_forms
from mlx_manager.mlx_server.models.checkpoint.rope_defaults import with_base
from mlx_manager.mlx_server.models.checkpoint.rotations import check_rotations
from mlx_manager.mlx_server.models.checkpoint.weight_files import WEIGHTS, WeightFiles

log = logging.getLogger(__name__)

BLANK = Path(__file__).with_name("blank")
QUANTISATION = "hf_quant_config.json"
STORED_BESIDE = ("scales", "biases", "global_scale")
"""Parameters that a quantised layer has beside its weight."""
MOST_NAMED = 3

Classes = Callable[[Any], tuple[Callable[[Any], nn.Module], Any]]
Sanitize = Callable[[dict[str, mx.array]], dict[str, mx.array]]
"""Function that returns tensors under the names that a class has for them."""
Weights = Callable[[nn.Module, Sanitize], dict[str, mx.array]]
"""Function that returns the parameters of a module."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A model as it is to be built: its config in the form that its class reads, and its heads."""

    folder: ModelFolder
    config: Mapping[str, Any]
    heads: Heads


def planned(folder: ModelFolder) -> BuildPlan:
    """Return the plan that `build` needs. Reads the folder's small files; any thread may call
    `planned`.

    Raises:
        ModelNotSupported: its class can't be built as config.json says.
        ModelLoadFailed: a file can't be read.
    """
    config = with_known_names(load_config(folder.path))
    config["model_type"] = architecture(config["model_type"]) or config["model_type"]
    quantisation = folder.path / QUANTISATION
    if "quantization_config" not in config and quantisation.is_file():
        config["quantization_config"] = json.loads(quantisation.read_bytes())
    config = with_old_names(in_all_forms(with_base(with_whole_text(config))))
    heads = Heads.of(folder.weights)
    if untied := heads.untied(config):
        log.warning(
            "%s: %s is no copy of the embeddings that config.json ties it to; it is used, as "
            "transformers uses it",
            folder.path,
            ", ".join(heads.heads),
        )
    return BuildPlan(folder, {**config, **untied}, heads)


def build(plan: BuildPlan) -> tuple[nn.Module, dict[str, Any]]:
    """Build the module, on the MLX thread. Return it, its parameters not evaluated, and its config.

    Raises:
        ModelLoadFailed: the weights are not those of such a model, or the class has no place for
            some of them, or computes its rotations otherwise than config.json says.
        ValueError, TypeError, ...: mlx-lm's errors over settings that it can't read.
    """

    def weights(model: nn.Module, sanitize: Sanitize) -> dict[str, mx.array]:
        heads = head_tensors(plan.folder.weights, plan.config)
        found = arrays_in(plan.folder.weights)
        found = {name: array for name, array in found.items() if name not in heads}
        return fitting(model, sanitize(dict(found)), found, plan)

    model, config = built(plan, plan.config, weights)
    check_rotations(model, plan.config, plan.folder.path / "config.json")
    return model, config


def built(
    plan: BuildPlan, config: Mapping[str, Any], weights: Weights
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a module of the plan's class by `config`; return it and its config. weights: returns
    the module's parameters by their names, and may change the module before.

    Raises:
        ModelLoadFailed, ValueError, TypeError, ...: as `build`.
    """
    model, settled = load_model(
        BLANK,
        lazy=True,
        # A copy: load_model and its classes add to it.
        model_config=deepcopy(
            {name: value for name, value in config.items() if name != "model_file"}
        ),
        get_model_classes=_classes(plan, weights),
    )
    return model, settled


def _classes(plan: BuildPlan, weights: Weights) -> Classes:
    """Return the function by which `load_model` finds an architecture's classes. A model made by
    the function takes `weights` in place of the arrays that it is given."""
    standard = inspect.signature(load_model).parameters["get_model_classes"].default

    def classes(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], Any]:
        own_code = plan.config.get("model_file")
        model_class, arguments_class = (
            language_classes(config, standard) or standard(config=config)
            if own_code is None
            else code_of(plan.folder.path / own_code)
        )

        def make(arguments: object) -> nn.Module:
            model: nn.Module = model_class(arguments)
            sanitize: Sanitize = getattr(model, "sanitize", dict)

            def own(_: dict[str, mx.array]) -> dict[str, mx.array]:
                del model.sanitize
                return weights(model, sanitize)

            model.sanitize = own
            return model

        return make, arguments_class

    return classes


def code_of(file: Path) -> tuple[Any, Any]:
    """Return the classes of a model that comes with its own code, which the owner lets run."""
    spec = importlib.util.spec_from_file_location("custom_model", file)
    if spec is None or spec.loader is None:
        raise ModelLoadFailed(f"{file} is no Python module.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


def arrays_in(weights: WeightFiles) -> dict[str, mx.array]:
    """Return the tensors of the files by their names, not evaluated."""
    return {
        name: array
        for file in weights.files
        for name, array in mx.load(str(file)).items()  # type: ignore[union-attr]
        if weights.holds(name, file)
    }


def fitting(
    model: nn.Module, weights: dict[str, mx.array], found: Mapping[str, mx.array], plan: BuildPlan
) -> dict[str, mx.array]:
    """Return `weights` without those that the model neither has a place for nor needs: copies of
    the embeddings, and tensors in files of their own, such as layers that draft tokens.

    Raises:
        ModelLoadFailed: there is a head that is no copy, and the class has none.
    """
    places = {name for name, _ in tree_flatten(model.parameters())}
    homeless = {name for name in weights if not _has_place(name, places)}
    heads = sorted(name for name in homeless if is_head(name))
    if heads and not plan.heads.are_copies:
        raise ModelLoadFailed(
            f"{plan.folder.path} has a head of its own ({heads[0]}), which is no copy of its "
            f"embeddings. mlx-lm {version('mlx-lm')}'s {plan.config['model_type']} has none beside "
            "them."
        )
    beside = {
        id(found[name])
        for name, file in plan.folder.weights.placed.items()
        if name in found and not fnmatch(file.name, WEIGHTS)
    }
    spare = [name for name in homeless if name in heads or id(weights[name]) in beside]
    if spare:
        log.info(
            "%s: not needed are %s%s",
            plan.folder.path,
            ", ".join(sorted(spare)[:MOST_NAMED]),
            f" and {len(spare) - MOST_NAMED} more" if len(spare) > MOST_NAMED else "",
        )
    return {name: array for name, array in weights.items() if name not in spare}


def _has_place(name: str, places: set[str]) -> bool:
    module, _, part = name.rpartition(".")
    return name in places or (part in STORED_BESIDE and f"{module}.weight" in places)
