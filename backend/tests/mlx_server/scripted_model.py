"""Real checkpoints that write a script: a tool loop needs a model that calls the right tools, and
an agent's first prompt needs a context that no model of a few megabytes was trained for.

`make_scripted_model(folder, [call("write", path="a.txt"), "Done."])` writes a folder that the
server loads like any other. The chat template ends in a token of its own for each answer of the
script, and the weights map every token of the script to the one after it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny_models import DECODER, random_model

import mlx_manager.demo_model as demo_model

DEMO = Path(demo_model.__file__).parent
EOT = "<|eot_id|>"
PIECE = 3
"""Characters of a token of the script, at least."""
CERTAIN = 60.0
"""Logit of the next token of the script. All others have 0."""

TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- '</tools><|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set script = SCRIPT %}
    {%- set said = namespace(count=0) %}
    {%- for message in messages if message.role == 'assistant' %}
        {%- if message.tool_calls or message.content in script %}
            {%- set said.count = said.count + 1 %}
        {%- endif %}
    {%- endfor %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '<|answer_' ~ (said.count % script | length + 1 if tools else 0) ~ '|>' }}
{%- endif %}
"""


def call(name: str, **arguments: object) -> str:
    """Return a tool call as Hermes's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_scripted_model(
    path: Path,
    script: Sequence[str],
    *,
    without_tools: str = "Without tools.",
    endless: bool = False,
    context_length: int = 131_072,
) -> Path:
    """Write a model that answers by a script to the folder `path`.

    script: the answers of a conversation that offers tools, one after the other and then again from
    the first: the answer after n of them is `script[n % len(script)]`. What an agent has the
    assistant say by itself does not count.
    without_tools: the answer where no tools are offered.
    endless: each answer begins again where it would end.
    """
    path.mkdir(parents=True, exist_ok=True)
    answers = (without_tools, *script)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    # An added token has the id that the vocabulary gives it.
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    following = []
    for number, pieces in enumerate(_chains(answers, taken=set(vocabulary))):
        opening = f"<|answer_{number}|>"
        added = tokenizer["added_tokens"][0] | {"id": len(vocabulary), "content": opening}
        tokenizer["added_tokens"].append(added)
        # No merge leads to the pieces: what is read is never made of them.
        for piece in (opening, *pieces):
            vocabulary[piece] = len(vocabulary)
        last = pieces[0] if endless else EOT
        following += pairwise(vocabulary[piece] for piece in (opening, *pieces, last))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO / "tokenizer_config.json", path)
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("SCRIPT", json.dumps(script)))
    _write_weights(path, following, len(vocabulary), context_length)
    return path


def _chains(answers: Sequence[str], taken: set[str]) -> list[list[str]]:
    """Return each answer in pieces, in the byte-level alphabet, no two of which are alike."""
    chains = []
    for answer in answers:
        assert answer.isascii()
        chain, piece = [], ""
        for character in answer.translate({ord(" "): "Ġ", ord("\n"): "Ċ"}):
            piece += character
            if len(piece) >= PIECE and piece not in taken:
                taken.add(piece)
                chain.append(piece)
                piece = ""
        # The rest is too short, or like another: it goes with what precedes it.
        while piece and chain and (len(piece) < PIECE or piece in taken):
            piece = chain.pop() + piece
        assert piece not in taken, f"{piece!r} is in the script twice"
        chain += [piece] if piece else []
        taken.update(chain)
        chains.append(chain)
    return chains


def _write_weights(
    path: Path, following: Sequence[tuple[int, int]], size: int, context_length: int
) -> None:
    """Write a model of one layer that adds nothing, in which each pair's first token is followed by
    its second, and all other tokens by any."""
    demo = json.loads((DEMO / "config.json").read_text())
    width = -(-(len(following) + 1) // 64) * 64
    config = DECODER | {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": size,
        "max_position_embeddings": context_length,
        **{name: demo[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    weights = dict(tree_flatten(random_model(config, seed=0, dtype=mx.float32).parameters()))
    head = weights["lm_head.weight"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] *= 0
    read, written = mx.zeros((size, width)), mx.zeros((size, width))
    read[:, 0], written[:, 0] = 1.0, head[:, 0]
    for place, (token, next_token) in enumerate(following, start=1):
        read[token, 0], read[token, place] = 0.0, 1.0
        # The norm before it makes a row of one 1 as long as the square root of its width.
        written[next_token, place] = CERTAIN / width**0.5
    weights |= {"model.embed_tokens.weight": read, "lm_head.weight": written}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
