"""The embedded model that sees: what is shipped, and what it answers about new drawings over HTTP.

training/vision/evaluate.py asks thousands of questions.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL")

from here import served_here
from pictures import data_url
from PIL import Image, ImageDraw
from thorough import slow

from mlx_manager.demo_model import demo_model_path
from mlx_manager.demo_vision_model import demo_vision_model_path
from training.vision.cases import Case, cases

MODEL = demo_vision_model_path()
NAME = "mlx-manager/demo-vision"
CASES, RIGHT = 20, 15
"""97 of 100 are right: one run in 10,000 of so many drawings would miss the mark by chance."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served_here(model=NAME) as client:
        yield client


def asked(client: httpx.Client, image: Image.Image, question: str) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}},
        {"type": "text", "text": question},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 60}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_what_sees_takes_six_megabytes_beside_the_language_model() -> None:
    sizes = {file.name: file.stat().st_size for file in MODEL.iterdir() if file.is_file()}
    assert sizes["model-vision.safetensors"] < 6_000_000
    assert sum(sizes.values()) < 15_000_000


def test_its_tokenizer_is_the_demo_models_with_a_name_for_rows_of_pictures() -> None:
    text = (demo_model_path() / "tokenizer.json").read_text()
    renamed = text.replace("<|finetune_right_pad_id|>", "<image>")
    assert json.loads((MODEL / "tokenizer.json").read_text()) == json.loads(renamed)


def test_it_is_offered_as_a_model_that_sees(client: httpx.Client) -> None:
    offered = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert offered[NAME]["input_modalities"] == ["text", "image"]


def test_it_tells_what_a_picture_shows(client: httpx.Client) -> None:
    image = Image.new("RGB", (400, 300), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((250, 90, 370, 210), "red")
    pen.rectangle((40, 100, 150, 210), "blue")
    said = asked(client, image, "What is in this picture?")
    assert said == "A blue square and a red circle right of it."


@pytest.mark.parametrize("wordings", ["held out", pytest.param("train", marks=slow)])
def test_it_is_right_about_drawings_that_training_never_saw(
    client: httpx.Client, wordings: Any
) -> None:
    def is_right(case: Case) -> bool:
        return asked(client, Image.fromarray(case.picture), case.question) == case.answer

    with ThreadPoolExecutor(8) as threads:
        right = list(threads.map(is_right, cases(CASES, wordings, seed=3)))
    assert sum(right) >= RIGHT


def test_it_still_answers_about_the_server(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert "42" in answer["choices"][0]["message"]["content"]
