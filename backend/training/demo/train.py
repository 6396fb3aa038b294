"""Trains the embedded model and writes its weights, on any device that MLX runs on.

    python tokenizer.py && python train.py

The weights are kept in f32 and rounded to bf16 in every forward pass, so that what is trained is
what is shipped. A seed fixes the text, its order and the initial weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from batches import batches
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from tokenizer import MODEL

Parameters = dict[str, Any]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--model", type=Path, default=MODEL, help="config and tokenizer")
    parser.add_argument("--out", type=Path, default=MODEL, help="where the weights go")
    return parser.parse_args()


def build(path: Path) -> Model:
    config = json.loads((path / "config.json").read_text())
    return Model(ModelArgs.from_dict(config))


def rounded(parameters: Parameters, compute: mx.Dtype) -> Parameters:
    """The weights as they will be stored, in the type that the products are made in."""
    return tree_map(lambda p: p.astype(mx.bfloat16).astype(compute), parameters)


def schedule(steps: int, rate: float) -> optim.schedulers.Scheduler:
    warmup = min(300, steps // 10)
    return optim.join_schedules(
        [
            optim.linear_schedule(rate / 100, rate, warmup),
            optim.cosine_decay(rate, steps - warmup, rate / 100),
        ],
        [warmup],
    )


def train(args: argparse.Namespace) -> Parameters:
    """Runs all the steps and returns the f32 weights."""
    mx.random.seed(args.seed)
    model = build(args.model)
    if args.start:
        model.load_weights(str(args.start))
        model.set_dtype(mx.float32)
    compute = getattr(mx, args.compute)
    optimizer = optim.AdamW(
        schedule(args.steps, args.rate), betas=[0.9, 0.95], weight_decay=args.decay
    )
    parameters = model.parameters()
    optimizer.init(parameters)
    state = [parameters, optimizer.state]

    def loss(parameters: Parameters, ids: mx.array, mask: mx.array) -> mx.array:
        model.update(rounded(parameters, compute))
        logits = model(ids[:, :-1]).astype(mx.float32)
        losses = nn.losses.cross_entropy(logits, ids[:, 1:])
        weights = mask[:, 1:].astype(mx.float32)
        return (losses * weights).sum() / weights.sum()

    @partial(mx.compile, inputs=state, outputs=state)
    def step(ids: mx.array, mask: mx.array) -> mx.array:
        value, gradients = mx.value_and_grad(loss)(state[0], ids, mask)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        state[0] = optimizer.apply_gradients(gradients, state[0])
        return value

    started, tokens, recent = time.perf_counter(), 0, []
    stream = batches(args.model, 100_000 * args.seed, args.tokens, args.workers)
    for number in range(1, args.steps + 1):
        ids, mask = next(stream)
        recent.append(step(mx.array(ids.astype("int32")), mx.array(mask)))
        mx.async_eval(recent[-1], state)
        tokens += ids.size
        if number % 200 == 0 or number in (20, args.steps):
            average = mx.stack(recent).mean().item()
            seconds = time.perf_counter() - started
            print(
                f"step {number} loss {average:.4f} perplexity {math.exp(average):.3f} "
                f"{seconds:.0f} s {tokens / seconds / 1e6:.2f} Mtokens/s",
                flush=True,
            )
            recent = []
    stream.close()
    return state[0]


def main() -> None:
    args = options()
    parameters = train(args)
    weights = dict(tree_flatten(tree_map(lambda p: p.astype(mx.bfloat16), parameters)))
    mx.save_safetensors(str(args.out / "model.safetensors"), weights, metadata={"format": "mlx"})
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{sum(w.size for w in weights.values()) / 1e6:.2f} M parameters, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
