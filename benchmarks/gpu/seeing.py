"""Write a folder of Qwen3-VL's 8B shape with random weights, for `benchmarks/images.py`.

    python benchmarks/gpu/seeing.py FOLDER [--layers 36] [--depth 27]

Tensors have the names of a published checkpoint; the tower is the one that we run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

HERE = Path(__file__).resolve().parent
BACKEND = HERE.parent.parent / "backend"
sys.path[:0] = [str(HERE), str(BACKEND), str(BACKEND / "tests" / "mlx_server")]

from synthetic import VOCABULARY, write_tokenizer  # noqa: E402
from tiny_models import random_model  # noqa: E402
from tiny_vision import SEEING, published_language, tower_tensors  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 5e6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 4096,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}


def write(folder: Path, layers: int, depth: int) -> None:
    """Write the model's folder."""
    made = SEEING["qwen3_vl"]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(made.tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | {"chat_template": made.template}
    settings_file.write_text(json.dumps(settings))
    vocabulary = VOCABULARY + len(made.tokens)
    levels = [depth * k // 4 for k in (1, 2, 3)]
    config = {
        "model_type": "qwen3_vl",
        "text_config": TEXT | {"num_hidden_layers": layers, "vocab_size": vocabulary},
        "vision_config": dict(made.config["vision_config"])
        | TOWER
        | {"depth": depth, "deepstack_visual_indexes": levels},
        "vocab_size": vocabulary,
        **{name: tokenizer.token_to_id(token) for name, token in made.ids.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {**made.processor, "patch_size": 16}
    processor["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    language = random_model(config, seed=0, dtype=mx.bfloat16)
    weights = {
        published_language(made, name): array for name, array in tree_flatten(language.parameters())
    }
    weights |= tower_tensors(made, folder, config, seed=1, dtype=mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=36, help="of the language model")
    parser.add_argument("--depth", type=int, default=27, help="layers of the tower")
    chosen = parser.parse_args()
    write(chosen.folder, chosen.layers, chosen.depth)


if __name__ == "__main__":
    main()
