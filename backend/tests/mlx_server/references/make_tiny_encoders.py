"""Write tiny_encoders.json: what sentence-transformers makes of the folders of `tiny_encoders`.

In an environment with torch, transformers 5.24, sentence-transformers 6.2 and pytest, from the
folder above this one: `python references/make_tiny_encoders.py`. One text at a time, in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import tiny_encoders as tiny  # noqa: E402  # it lies beside this folder

DIGITS, FIRST = 5, 8


def embedded(folder: Path) -> list[list[float]]:
    model = SentenceTransformer(str(folder), device="cpu")
    rows = [model.encode([text])[0][:FIRST] for text in tiny.SAID]
    return [[round(float(number), DIGITS) for number in row] for row in rows]


def ranked(folder: Path) -> dict[str, list[float]]:
    model = CrossEncoder(str(folder), device="cpu")
    pairs = [(tiny.QUERY, text) for text in tiny.SAID]
    identity = torch.nn.Identity()
    return {
        "scores": [round(float(model.predict([pair])[0]), 6) for pair in pairs],
        "logits": [
            round(float(model.predict([pair], activation_fn=identity)[0]), DIGITS) for pair in pairs
        ],
    }


def judged(folder: Path, instruction: str) -> list[float]:
    """Return scores as the model card of Qwen3-Reranker computes them; of a classifier that was
    made of it, as that one's card does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    is_classifier = (folder / "config.json").read_text().count("ForSequenceClassification") > 0
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    model = kind.from_pretrained(folder).eval()
    before, after = tiny.CARD
    scores = []
    for text in tiny.SAID:
        asked = f"<Instruct>: {instruction}\n<Query>: {tiny.QUERY}\n<Document>: {text}"
        ids = [
            token
            for part in (before, asked, after)
            for token in tokenizer(part, add_special_tokens=False)["input_ids"]
        ]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        if is_classifier:
            score = torch.sigmoid(logits[0])
        else:
            score = torch.softmax(logits[-1][[tiny.NO, tiny.YES]], dim=0)[1]
        scores.append(round(float(score), 6))
    return scores


def main() -> None:
    found: dict[str, Any] = {"embed": {}, "rank": {}, "judge": {}}
    with TemporaryDirectory() as place:
        root = Path(place)
        for name, how in tiny.EMBEDDERS.items():
            folder = tiny.make_tiny_encoder(root / name, tiny.type_of(name), **how)
            found["embed"][name] = embedded(folder)
        for name in tiny.RERANKERS:
            folder = tiny.make_tiny_encoder(root / f"rank-{name}", name, reranker=True)
            found["rank"][name] = ranked(folder)
        for name, how in tiny.JUDGES.items():
            folder = tiny.make_tiny_judge(root / name, **how)
            if how.get("template"):
                found["judge"][name] = ranked(folder)["scores"]
            else:
                found["judge"][name] = judged(folder, tiny.INSTRUCTION)
                found["judge"][f"{name}, asked"] = judged(folder, tiny.ASKED)
    (HERE / "tiny_encoders.json").write_text(packed(found))


def packed(found: dict[str, Any]) -> str:
    """Return the JSON with a line for each list of numbers."""
    parts = []
    for group, entries in found.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in entries.items()]  # fmt: skip
        parts.append(f" {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
