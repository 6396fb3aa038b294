"""Ollama's own client shows pictures: as paths, bytes and base64."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import ollama

RED, BLUE = map(Path, sys.argv[1:3])
URL = sys.argv[3].removesuffix("/v1")
MODEL = "sees"
OPTIONS = {"temperature": 0, "num_predict": 8}
client = ollama.Client(host=URL)

assert "vision" in (client.show(MODEL).capabilities or ())


def ask(image: object, stream: bool = False) -> object:
    message = {"role": "user", "content": "What is this?", "images": [image]}
    return client.chat(MODEL, messages=[message], options=OPTIONS, stream=stream)


told = [
    ask(shown)
    for shown in (str(RED), RED.read_bytes(), base64.b64encode(RED.read_bytes()).decode())
]
assert len({answer.message.content for answer in told}) == 1
bare = client.chat(MODEL, messages=[{"role": "user", "content": "What is this?"}], options=OPTIONS)
assert told[0].prompt_eval_count > bare.prompt_eval_count + 10
streamed = "".join(piece.message.content for piece in ask(str(RED), stream=True))
assert streamed == told[0].message.content
generated = client.generate(MODEL, "What is this?", images=[str(RED)], options=OPTIONS)
assert generated.response == told[0].message.content
two = [{"role": "user", "content": "Compare.", "images": [str(RED), str(BLUE)]}]
assert client.chat(MODEL, messages=two, options=OPTIONS).prompt_eval_count > 20
refused = ""
try:
    ask(base64.b64encode(RED.read_bytes()[:60]).decode())
except ollama.ResponseError as error:
    refused = error.error
assert "messages[0].images[0]" in refused, refused
