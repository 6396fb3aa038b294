"""Asks the embedded model that sees about new drawings and prints how often it is right.

    cd backend && python -m training.vision.evaluate [--cases 500] [--wrong]

Drawings come from seeds that training keeps free; the first table asks in wordings kept out of
training, the second in those of training. An answer is right when it is the expected one word for
word. The tower and the connector are mlx-vlm's, the language model is mlx-lm's Llama.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_vlm.models.idefics3.config import ModelConfig, TextConfig, VisionConfig
from mlx_vlm.models.idefics3.idefics3 import Idefics3Connector
from mlx_vlm.models.idefics3.vision import VisionModel

from training.vision.cases import Case, cases, table
from training.vision.demo import SEEING
from training.vision.samples import ROWS, tokenizer

LONGEST = 40


class Eyes(nn.Module):
    """Tower and connector, under Idefics3's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_model = VisionModel(VisionConfig.from_dict(config["vision_config"]))
        self.vision_model.post_layernorm.eps = config["vision_config"]["layer_norm_eps"]
        whole = ModelConfig(
            text_config=TextConfig.from_dict(config["text_config"]),
            vision_config=VisionConfig.from_dict(config["vision_config"]),
            model_type=config["model_type"],
            scale_factor=config["scale_factor"],
        )
        self.connector = Idefics3Connector(whole)

    def __call__(self, pixels: mx.array) -> mx.array:
        hidden, *_ = self.vision_model(pixels)
        return self.connector(hidden)


class Seeing:
    """The model in float32: answers greedily, pictures of one prompt length together."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.eyes = Eyes(config)
        tower = _load(folder / "model-vision.safetensors")
        tower = {name.removeprefix("model."): array for name, array in tower.items()}
        self.eyes.load_weights(list(self.eyes.vision_model.sanitize(tower).items()))
        self.language = Model(ModelArgs.from_dict({"model_type": "llama", **config["text_config"]}))
        words = _load(folder / "model.safetensors")
        words = {name.replace("text_model.", "", 1): array for name, array in words.items()}
        self.language.load_weights(list(words.items()))
        for module in (self.eyes, self.language):
            module.set_dtype(mx.float32)
        self.end = tokenizer().token_to_id("<|eot_id|>")

    def answer(self, case: Case) -> str:
        """Return the answer to one question."""
        prompt = case.prompt()
        pixels = mx.array(case.picture.astype(np.float32) / 127.5 - 1)[None]
        embeddings = self.language.model.embed_tokens(mx.array([prompt.ids]))
        place = prompt.places[0]
        embeddings[:, place : place + ROWS] = self.eyes(pixels)
        cache = make_prompt_cache(self.language)
        ids = mx.array([prompt.ids])
        logits = self.language(ids, cache=cache, input_embeddings=embeddings)
        said: list[int] = []
        while len(said) < LONGEST:
            token = int(logits[0, -1].argmax().item())
            if token == self.end:
                break
            said.append(token)
            logits = self.language(mx.array([[token]]), cache=cache)
        return str(tokenizer().decode(said, skip_special_tokens=False))


def _load(file: Path) -> dict[str, mx.array]:
    found = mx.load(str(file))
    if not isinstance(found, dict):
        raise TypeError(f"{file} holds no named tensors")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=SEEING)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    seeing = Seeing(args.model)
    for split in ("held out", "train"):
        asked = cases(args.cases, split)
        said = [seeing.answer(case) for case in asked]
        print(f"Wordings: {split}\n\n{table(asked, said)}\n", flush=True)
        for case, answer in zip(asked, said, strict=True):
            if args.wrong and answer != case.answer:
                print(f"{case.question!r}\n  expected {case.answer!r}\n  got      {answer!r}")


if __name__ == "__main__":
    main()
