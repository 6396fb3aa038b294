"""Writes the folder of the embedded model that sees, a checkpoint of Idefics3.

    cd backend && python -m training.vision.pack RUN [--model FOLDER]

RUN is a folder that train.py wrote. The rest comes from the embedded language model's folder:
config.json gets the tower's shape, the tokenizer the name of the token that stands for a row of a
picture. `model.safetensors` is RUN's tuned language model where it has one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from training.vision.demo import MODEL, SEEING
from training.vision.shape import SCALE_FACTOR, SIDE, TOWER

PLACEHOLDER = "<image>"
WAS = "<|finetune_right_pad_id|>"  # the token's name before it had a use
PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_convert_rgb": True,
    "do_resize": False,
    "do_image_splitting": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
    "resample": 1,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
}
TEXT_ONLY = ("architectures", "model_type", "torch_dtype", "use_cache")


def config_of(text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model that sees, from that of its language model."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "torch_dtype": "bfloat16",
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "image_token_id": text["pad_token_id"],
        "scale_factor": SCALE_FACTOR,
        "tie_word_embeddings": True,
        "vocab_size": text["vocab_size"],
        "text_config": {"model_type": "llama", **_without(text)},
        "vision_config": TOWER,
    }


def _without(text: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in text.items() if name not in TEXT_ONLY}


def weights_of(run: Path) -> dict[str, mx.array]:
    """Return the tower's and the connector's tensors as Idefics3 names them, in bfloat16."""
    found = mx.load(str(run / "eyes.safetensors"))
    if not isinstance(found, dict):
        raise TypeError("eyes.safetensors holds no named tensors")
    return {
        name.replace("eyes.", "model.", 1): array.astype(mx.bfloat16)
        for name, array in found.items()
        if name.startswith("eyes.")
    }


def language_of(file: Path) -> dict[str, mx.array]:
    """Return the language model's tensors as Idefics3 names them."""
    found = mx.load(str(file))
    if not isinstance(found, dict):
        raise TypeError(f"{file} holds no named tensors")
    inner = {
        name.removeprefix("model.").removeprefix("text_model."): array
        for name, array in found.items()
    }
    return {f"model.text_model.{name}": array for name, array in inner.items()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, default=SEEING)
    args = parser.parse_args()
    args.model.mkdir(parents=True, exist_ok=True)
    write_json(
        args.model / "config.json", config_of(json.loads((MODEL / "config.json").read_text()))
    )
    write_json(args.model / "preprocessor_config.json", PREPROCESSOR)
    write_json(
        args.model / "processor_config.json",
        {
            "processor_class": "Idefics3Processor",
            "image_seq_len": (SIDE // 16 // SCALE_FACTOR) ** 2,
        },
    )
    for name in ("chat_template.jinja", "generation_config.json"):
        shutil.copyfile(MODEL / name, args.model / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (args.model / name).write_text((MODEL / name).read_text().replace(WAS, PLACEHOLDER))
    tuned = args.run / "language.safetensors"
    language = language_of(tuned if tuned.is_file() else MODEL / "model.safetensors")
    parts = {"model.safetensors": language, "model-vision.safetensors": weights_of(args.run)}
    for name, weights in parts.items():
        mx.save_safetensors(str(args.model / name), weights, {"format": "mlx"})
        print(f"{name}: {(args.model / name).stat().st_size / 1e6:.2f} MB")
    total = sum(array.nbytes for weights in parts.values() for array in weights.values())
    placed = {tensor: name for name, weights in parts.items() for tensor in sorted(weights)}
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    write_json(args.model / "model.safetensors.index.json", index)


if __name__ == "__main__":
    main()
