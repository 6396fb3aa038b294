"""Loading of a checkpoint's vision tower: the tensors that mlx-lm's classes drop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_manager.mlx_server.errors import MLXManagerError, ModelLoadFailed
from mlx_manager.mlx_server.models.adapters.vocabulary import token_id
from mlx_manager.mlx_server.models.checkpoint.building import BuildPlan, arrays_in
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.weight_files import headers_of
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.family import VisionFacts
from mlx_manager.mlx_server.models.loading.weights import (
    Form,
    activation_dtype,
    convert,
    default_device,
    evaluate,
)
from mlx_manager.mlx_server.models.modalities import blindness
from mlx_manager.mlx_server.utils.broken import BROKEN, problem
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard
from mlx_manager.mlx_server.utils.text import sized
from mlx_manager.mlx_server.vision.prompts import Vision
from mlx_manager.mlx_server.vision.towers import tower_of
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower

log = logging.getLogger(__name__)

PROCESSOR, AROUND = "preprocessor_config.json", "processor_config.json"
SECTIONS = ("vision_config", "text_config")
MOST_NAMED = 3
NARROW = ("BF16", "F16")


def tower_bytes(plan: BuildPlan) -> int:
    """Return the bytes that a checkpoint's vision tower takes once it is loaded, by the headers of
    its files."""
    facts = vision_facts(plan.config)
    if facts is None or blindness(plan.config, plan.folder.path):
        return 0
    tensors = [
        tensor
        for found in headers_of(plan.folder.weights).values()
        for name, tensor in found.items()
        if name.startswith(facts.tensors)
    ]
    widens = default_device() == "cpu"
    return sum(
        (tensor.end - tensor.start) * (2 if widens and tensor.dtype in NARROW else 1)
        for tensor in tensors
    )


def load_vision(
    model_id: str,
    plan: BuildPlan,
    tokenizer: TokenizerWrapper,
    model: nn.Module,
    ledger: Ledger,
    *,
    doing: Doing = unheard,
) -> Vision | None:
    """Return what a checkpoint sees by, its weights in memory, or None if it can't see here. The
    log says why. On the MLX thread.

    model: the language model, in its form. Its line in the ledger grows by the tower's bytes.
    """
    facts = vision_facts(plan.config)
    if reason := blindness(plan.config, plan.folder.path):
        if "vision_config" in plan.config:
            log.warning("%s takes no pictures: %s", model_id, reason)
        return None
    assert facts is not None, "it would be blind"
    doing("its vision tower is read")
    try:
        vision = _made(plan, facts, tokenizer, activation_dtype(model))
    except MLXManagerError as error:
        log.warning("%s takes no pictures: %s", model_id, error.message)
        return None
    except BROKEN as error:
        log.warning("%s takes no pictures: %s", model_id, problem(error), exc_info=error)
        return None
    tower = vision.tower
    nbytes = sum(array.nbytes for _, array in tree_flatten(tower.module.parameters()))
    if not ledger.reserve(f"weights:{model_id}", nbytes):
        log.warning(
            "%s takes no pictures: there is no memory for its vision tower, which takes %s",
            model_id,
            sized(nbytes),
        )
        return None
    evaluate(tower.module, doing)
    tower.record_layers()
    return vision


def _made(
    plan: BuildPlan, facts: VisionFacts, tokenizer: TokenizerWrapper, dtype: mx.Dtype
) -> Vision:
    """Return the tower, its weights not evaluated. dtype: type of the language model's input."""
    checkpoint = checkpoint_of(plan)
    tower = tower_of(facts.tower, checkpoint)
    row = token_id(tokenizer, tower.row)
    if row is None:
        raise ModelLoadFailed(f"the tokenizer has no token {tower.row}")
    tensors = {
        tower.renamed(name): array
        for name, array in arrays_in(plan.folder.weights).items()
        if name.startswith(facts.tensors)
    }
    fill(tower.module, tower.sanitized(tensors), plan.config, tower)
    tower.dtype, tower.width = dtype, int(checkpoint.text["hidden_size"])
    if default_device() == "cpu" and dtype == mx.float32:
        # MLX's CPU multiplies nothing else fast.
        convert(tower.module, Form("dequantized-float32", 0, dense=True, wide=True))
    return Vision(tower, facts.placeholder, row)


def checkpoint_of(plan: BuildPlan) -> Checkpoint:
    """Return a checkpoint's settings, with transformers' defaults where config.json has none."""
    folder = plan.folder.path
    around = _settings(folder / AROUND)
    nested = around.get("image_processor")
    processor = _settings(folder / PROCESSOR) or (nested if isinstance(nested, dict) else {})
    # As it stands in the folder: the plan's has settings in the forms of mlx-lm's classes.
    return Checkpoint(folder, with_defaults(plan.folder.config), processor, around)


def _settings(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the settings of encoder and projector that it leaves out, as
    transformers has them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config["model_type"]).replace("-", "_")
    if kind not in CONFIG_MAPPING:
        return dict(config)
    given = {name: config[name] for name in SECTIONS if name in config}
    known = CONFIG_MAPPING[kind](**given).to_dict()
    whole = {name: {**known[name], **section} for name, section in given.items()}
    # Older configs of Qwen2.5-VL have the language model's settings beside the encoder's.
    return {**known, "text_config": config, **config, **whole}


def fill(
    module: nn.Module,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, Any],
    tower: VisionTower,
) -> None:
    """Give a tower its tensors, quantised as they are.

    Raises:
        ModelLoadFailed: tensors are missing, or have other shapes.
        ValueError, KeyError: a quantisation is unknown.
    """
    quantisation = config.get("quantization") or {}
    own = {
        tower.renamed(path): settings
        for path, settings in quantisation.items()
        if isinstance(settings, Mapping)
    }

    def packed(path: str, layer: nn.Module) -> bool | Mapping[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        return own.get(path, True)

    if any(name.endswith(".scales") for name in tensors):
        whole = {name: quantisation[name] for name in ("group_size", "bits")}
        mode = quantisation.get("mode", "affine")
        nn.quantize(module, **whole, mode=mode, class_predicate=packed)
    wanted = dict(tree_flatten(module.parameters()))
    check_tensors(wanted, tensors)
    module.update(tree_unflatten([(name, tensors[name]) for name in wanted]))
    module.eval()


def check_tensors(wanted: Mapping[str, mx.array], tensors: Mapping[str, mx.array]) -> None:
    """Check that a checkpoint has the tensors that a tower wants, by their names.

    Raises:
        ModelLoadFailed: some are missing, or have other shapes or a form that is not read here.
    """
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ModelLoadFailed(
            f"its folder lacks {', '.join(missing[:MOST_NAMED])}{more} of the vision tower"
        )
    for name, array in wanted.items():
        found = tensors[name]
        if found.shape != array.shape:
            raise ModelLoadFailed(
                f"{name} of the vision tower has the shape {found.shape}, and its config.json says "
                f"{array.shape}"
            )
        module, _, part = name.rpartition(".")
        quantised = part == "scales" or f"{module}.scales" in wanted
        if not quantised and not mx.issubdtype(found.dtype, mx.floating):
            raise ModelLoadFailed(
                f"{name} of the vision tower is stored as {found.dtype}, which is not read here"
            )
