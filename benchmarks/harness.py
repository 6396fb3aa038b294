"""Parts of every benchmark: interleaved rounds, ratios with their spread, the machine, models.

The sides of a comparison take turns inside one run, first one first, then the other, so that a
machine that warms up or is busy with something else weighs on both. A ratio is the median of the
ratios of the rounds, with the smallest and the largest beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "backend" / "mlx_manager" / "demo_model"


# --- Rounds and ratios --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours divided by theirs, a value a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        digits = 2 if self.median >= 0.1 else 3
        return f"{self.median:.{digits}f}× ({low:.{digits}f}-{high:.{digits}f})"


def interleave(
    sides: Mapping[str, Callable[[int], T]], rounds: int, *, cold: bool = False
) -> dict[str, list[T]]:
    """Call every side once a round with the round's number; the order turns every round.

    Round -1 warms up and is not counted; `cold` leaves it out.
    """
    for side in () if cold else sides.values():
        side(-1)
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            results[name].append(sides[name](number))
    return results


def apart(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Result of `work`, called in a process of its own, which has nothing compiled or cached."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        return worker.submit(work, *arguments, **named).result()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    return Ratio(tuple(a / b for a, b in zip(ours, theirs, strict=True)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- What is printed ----------------------------------------------------------------------------


def print_report(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A section that can be pasted into RESULTS.md: machine, command, table."""
    print(f"\n## {title}\n")
    print(f"{describe_machine()}\n")
    print(f"`{shown_command()}`\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "|".join("---" if i == 0 else "--:" for i in range(len(columns))) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def shown_command() -> str:
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return shlex.join([".venv/bin/python", str(script), *sys.argv[1:]])


def describe_machine() -> str:
    """One line: device, cores, memory, system, versions, commit, date."""
    import mlx.core as mx

    from mlx_manager.mlx_server.utils.memory import device_memory

    device = mx.device_info().get("device_name", platform.processor())
    parts = [
        f"{device}, {os.cpu_count()} cores, {device_memory() / 2**30:.0f} GiB",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        f"mlx {version('mlx')} ({mx.default_device().type.name})",
        f"mlx-lm {version('mlx-lm')}",
        commit(),
        date.today().isoformat(),
    ]
    return "; ".join(parts) + "."


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"commit {answer.stdout.strip()}" if answer.returncode == 0 else "no commit"


def parser(description: str | None, rounds: int, model: str = "demo") -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--model",
        default=model,
        help="demo, demo-f32, demo-4bit, f32, bf16, 4bit, smollm2, wide, experts, hybrid, "
        "latent or a folder",
    )
    result.add_argument("--rounds", type=int, default=rounds, help="rounds that count")
    return result


def wanted(name: str, only: Sequence[str]) -> bool:
    """Return whether `--only` leaves the line `name` in."""
    return not only or name in only


def refuse(reason: str) -> NoReturn:
    """End the run: figures of a program that answers wrongly mean nothing."""
    sys.exit(f"no figures: {reason}")


# --- Models -------------------------------------------------------------------------------------


def endless_demo(folder: Path, form: str = "bf16", context: int = 16_384) -> Path:
    """The embedded model, never ending a turn by itself (see `outvoted`), and a longer context.

    Its greedy answers run to `max_tokens`, so that both sides of a comparison do the same work
    whichever parameters they offer for ignoring an end of turn. `form` is as it is stored: bf16
    (as shipped), f32, or 4bit (groups of 64, bf16 scales, as mlx-community stores models).
    """
    import json

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model, quantize_model

    target = folder / f"endless-demo-{form}"
    if target.exists():
        return target
    shutil.copytree(DEMO, target)
    model, config = load_model(DEMO)
    config["max_position_embeddings"] = context
    output = model.model.embed_tokens if config["tie_word_embeddings"] else model.lm_head
    output.weight = outvoted(output.weight, end_tokens(target))
    if form == "f32":
        model.set_dtype(mx.float32)
    if form == "4bit":
        model, config = quantize_model(model, config, group_size=64, bits=4)
    (target / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    return target


def gaps_around(
    streams: Sequence[Sequence[float]], running: float, begin: float, end: float
) -> tuple[list[float], list[float]]:
    """The gaps between the times of each stream from `running` to `begin`, and those until `end`; a
    gap that spans `begin` is one of the latter."""
    idle: list[float] = []
    meanwhile: list[float] = []
    for times in streams:
        for a, b in pairwise(times):
            if a >= running and b <= begin:
                idle.append(b - a)
            elif b > begin and a < end:
                meanwhile.append(b - a)
    return idle, meanwhile


def outvoted(weight: Any, ids: Sequence[int]) -> Any:
    """An output layer's weight, (tokens, inputs), with the mean of all others as the rows of `ids`.

    A logit of theirs is the mean of the others' logits, and so never the largest. Rows of zeros
    would not do: where a model expects no token, every other logit is negative.
    """
    import mlx.core as mx

    few = mx.array(list(ids))
    kept = mx.ones((weight.shape[0], 1))
    kept[few] = 0
    rows = weight.astype(mx.float32)
    rows[few] = (rows * kept).sum(axis=0) / kept.sum()
    return rows.astype(weight.dtype)


def end_tokens(folder: Path) -> list[int]:
    """The ids of every special token that may end a turn."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(folder)
    ends = {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"} & set(tokenizer.get_vocab())
    return sorted({*tokenizer.eos_token_ids, *(tokenizer.convert_tokens_to_ids(t) for t in ends)})


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A llama of random weights. The default has about 60 million parameters."""

    hidden: int = 512
    layers: int = 12
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    mlp: int = 2048
    context: int = 16_384


def synthetic_llama(folder: Path, form: str, shape: LlamaShape = LlamaShape()) -> Path:
    """A llama with random weights under the embedded model's tokenizer, written once.

    `form` is f32, bf16, or 4bit (groups of 64, bf16 scales, as mlx-community stores them).
    """
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
    }
    return written_once(folder / f"llama-{shape.layers}x{shape.hidden}-{form}", form, sizes)


def synthetic_smollm2(folder: Path) -> Path:
    """SmolLM2-135M's shape: 135 million parameters in float32, which no cache of a CPU holds. Its
    output layer has 49 152 rows, more than the embedded model's tokenizer has tokens. Written once.
    """
    sizes = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
    }
    return written_once(folder / "smollm2-30x576", "f32", sizes)


def synthetic_wide(folder: Path) -> Path:
    """A llama of two narrow layers with 16 heads of keys and values each: 32 KiB a token in
    float32, as much as a 1B keeps in 16 bits, for the work of 10 million parameters. Written
    once."""
    return synthetic_llama(folder, "f32", LlamaShape(128, 2, 16, 16, 128, 256))


def synthetic_experts(folder: Path) -> Path:
    """A Qwen 3 with experts, 64 of 512 and 8 a row in each of 4 layers: 420 million parameters in
    float32, of which a row goes through 60. Written once."""
    sizes = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "max_position_embeddings": LlamaShape().context,
    }
    return written_once(folder / "experts-4x1024", "f32", sizes)


def synthetic_hybrid(folder: Path) -> Path:
    """A Qwen 3.5, a third of the layers of its 0.8B: 170 million parameters in float32. Of four
    layers three are gated delta ones. Written once."""
    sizes = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [11, 11, 10],
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": LlamaShape().context,
    }
    return written_once(folder / "hybrid-8x1024", "f32", sizes)


def synthetic_latent(folder: Path) -> Path:
    """A GLM 4.7 Flash, 4 layers of half its width, 16 of 64 experts: 190 million parameters in
    float32. Attention is latent: of keys and values 576 numbers a token are kept. Written once."""
    sizes = {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "intermediate_size": 4096,
        "moe_intermediate_size": 768,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "max_position_embeddings": LlamaShape().context,
    }
    return written_once(folder / "latent-4x1024", "f32", sizes)


def written_once(target: Path, form: str, sizes: Mapping[str, Any]) -> Path:
    """`write_random_model` of what is not there as a whole."""
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_random_model(partial, form, sizes)
    return partial.rename(target)


def write_random_model(target: Path, form: str, sizes: Mapping[str, Any]) -> None:
    """The embedded model's folder with random weights. `sizes`: what config.json says of them, and
    of another family."""
    import json
    from importlib import import_module

    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_tokenizer

    shutil.copytree(DEMO, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    config = json.loads((DEMO / "config.json").read_text()) | {
        **sizes,
        "tie_word_embeddings": True,
    }
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = family.Model(family.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32 if form == "f32" else mx.bfloat16)
    embedding = model.model.embed_tokens
    # No greedy answer ends before `max_tokens`, nor has tokens that the tokenizer does not know.
    known = len(load_tokenizer(target))
    never = [*end_tokens(target), *range(known, embedding.weight.shape[0])]
    embedding.weight = outvoted(embedding.weight, never)
    if "num_experts_per_tok" in config:
        # So that tokens decide which experts a row gets, and not what random layers make alike of
        # all: of trained models all experts have rows.
        embedding.weight = embedding.weight * 30
    if form == "4bit":
        config["quantization"] = {"group_size": 64, "bits": 4}
        nn.quantize(model, group_size=64, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config))


def find_model(name: str, folder: Path) -> Path:
    """`demo` is the embedded model made endless, `demo-f32` and `demo-4bit` the same stored so;
    f32, bf16, 4bit, smollm2, wide, experts, hybrid and latent are synthetic; anything else is a
    path."""
    synthetic = {
        "smollm2": synthetic_smollm2,
        "wide": synthetic_wide,
        "experts": synthetic_experts,
        "hybrid": synthetic_hybrid,
        "latent": synthetic_latent,
    }
    match name:
        case "demo":
            return endless_demo(folder)
        case "demo-f32" | "demo-4bit":
            return endless_demo(folder, name.removeprefix("demo-"))
        case "f32" | "bf16" | "4bit":
            return synthetic_llama(folder, name)
        case _ if name in synthetic:
            return synthetic[name](folder)
        case _:
            return Path(name)
