"""Host time of a decode step, by part, and how many launches it is; on any machine.

    PYTHONPATH=backend python benchmarks/host_time.py [--rows 1 32 64 128] [--steps 600]
        [--model llama|olmo2|falcon_h1|granitemoehybrid|mamba2] [--plain] [--drafts]

The engine as it runs on a GPU: a step ahead, its steps compiled, those of a llama fused, and of
other models by mlx-lm's modules. The model is so small that it takes the device next to nothing, a
llama's prompts are not computed, and the kernels are stand-ins of one operation each. `python` is
the engine's own; what MLX takes to make and to queue the graph and to wait for its tokens is apart,
and so is the event loop, whose readers do nothing but count. On a CPU MLX queues operations that a
GPU launches together one by one, so that `queue` says how many there are and no more.
With `--drafts` drafts are looked for, by default settings; at `--temperature 1` there are none. In
microseconds of the thread's processor time: the smallest of all steps, and the median.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import gc
import io
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import Event, Sampling
from mlx_manager.mlx_server.devices.attention import splits
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.stream import LoopRow
from mlx_manager.mlx_server.engine.text_engine import TextEngine
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.compiled import Compile
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.forward import Decode, Forward
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.formats import PLAIN
from mlx_manager.mlx_server.text.output_parser import OutputParser
from mlx_manager.mlx_server.utils.memory import Ledger

PAGE = 16
VOCABULARY = 512
PROMPT = 128
# Steps after which everything is compiled and nobody joins any more.
WARM = 120
PARTS = ("schedule", "decode", "forward", "draw", "read", "route", "flush", "rest")
APART = ("make", "queue", "wait", "loop")
VIEWS = frozenset(("Transpose", "Split", "Slice", "ExpandDims", "Reshape", "Broadcast", "Squeeze"))
# An RMS norm is one launch on a GPU, and on a CPU three operations besides the one compiled.
NORM = frozenset(("Square", "Sum"))


DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
# By layers.
MODELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "llama": lambda layers: {"num_hidden_layers": layers},
    "olmo2": lambda layers: {"num_hidden_layers": layers},
    "falcon_h1": lambda layers: {
        "num_hidden_layers": layers,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "attention_out_multiplier": 1.0,
    },
    "granitemoehybrid": lambda layers: {
        "num_hidden_layers": layers,
        # As in Granite 4 H 1B: one of ten.
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(layers)],
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "mamba2": lambda layers: {
        "num_hidden_layers": layers,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
}


class StandIn:
    """`PagedKernels` whose attention, and what writes, is one operation, with a kernel's inputs."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._dep = mx.zeros((1,), mx.int32)

    def plan(self, lengths: Any, **options: Any) -> splits.Splits:
        return splits.plan(lengths, blocks_per_item=1, blocks_wanted=528, **options)

    def write(self, *inputs: mx.array) -> mx.array:
        found: list[mx.array] = mx.depends([self._dep], list(inputs))
        return found[0]

    def attend(self, queries: mx.array, *inputs: mx.array, **options: Any) -> mx.array:
        found: list[mx.array] = mx.depends([queries], [*inputs, options["splits"].items])
        return found[0]

    def attend_fused(self, qkv: mx.array, *inputs: Any, **options: Any) -> mx.array:
        arrays = [array for array in inputs if isinstance(array, mx.array)]
        queries = qkv[:, : self.shape.q_heads * self.shape.head_dim]
        found: list[mx.array] = mx.depends([queries], [*arrays, options["splits"].items])
        return found[0]


class DecodesAlone(FusedForward):
    """Leaves prompts out."""

    def run(self, decode: Decode | None, chunks: Any) -> mx.array:
        if decode is not None and not chunks:
            return super().run(decode, chunks)
        self._running.batch = None
        rows = len(decode.keys) if decode else 0
        return mx.zeros((max(1, rows + sum(chunk.final for chunk in chunks)), VOCABULARY))


class Words:
    """A detokenizer: each token is a word."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        return self._decode(b" w%d" % token_id)

    def finish(self) -> str:
        return ""


def as_on_a_gpu() -> None:
    """A norm, or a rotation, is one operation."""

    def alone(x: mx.array, *inputs: Any, **options: Any) -> mx.array:
        arrays = [each for each in (*inputs, *options.values()) if isinstance(each, mx.array)]
        return mx.depends([x], arrays)[0] if arrays else x

    mx.fast.rms_norm = mx.fast.rope = alone


def module(name: str, layers: int) -> nn.Module:
    config = {"model_type": name, **DECODER, **MODELS[name](layers)}
    family = import_module(f"mlx_lm.models.{name}")
    model: nn.Module = family.Model(family.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def forward(name: str, layers: int, compile: Compile) -> Forward:
    model = module(name, layers)
    if name != "llama":
        built = KernelSet(StandIn)  # type: ignore[arg-type]
        kind = RaggedForward if name == "olmo2" else SeparateForward
        return kind(model, PAGE, KeyAccess.PAGES, built, compile)
    decoder = FusedDecoder.build(model, PAGE, StandIn, compile=compile)  # type: ignore[arg-type]
    assert isinstance(decoder, FusedDecoder), decoder
    stores = [LayerStore(LayerShape(1, 32, 32, mx.bfloat16), PAGE) for _ in range(layers)]
    return DecodesAlone(stores, decoder, PAGE)


class Stopwatch:
    """Time by part; what a part calls that has a name of its own counts there alone."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside: list[float] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.spent[part] += taken - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken

        setattr(owner, name, timed)


def watch(engine: TextEngine) -> Stopwatch:
    watch = Stopwatch()
    runner, outputs = engine._runner, engine._outputs
    for owner, name, part in (
        (engine, "schedule", "schedule"),
        (runner, "_decode", "decode"),
        (runner, "sample", "draw"),
        (engine, "read", "read"),
        (engine, "take", "read"),
        (outputs, "_route", "route"),
        (engine._forward, "run", "forward"),
    ):
        watch.wrap(owner, name, part)
    match engine._forward:
        case FusedForward() as fused:
            watch.wrap(fused._decoder, "run", "make")
        case RaggedForward() | SeparateForward() as by_module:
            assert by_module.rows is not None
            watch.wrap(by_module.rows.kinds, "run", "make")
    watch.wrap(engine._outbox, "flush", "flush")
    watch.wrap(mx, "async_eval", "queue")
    return watch


async def steps(
    runs: Forward, rows: int, count: int, temperature: float, *, drafts: bool
) -> list[dict[str, float]]:
    """Seconds of each step, by part."""
    engine = TextEngine(
        "stand-in",
        runs,
        EngineLimits(max_rows=rows),
        Ledger(1 << 30, cache_bytes=lambda: 0),
        looks_ahead=True,
        clock=time.thread_time,
    )
    got = [0] * rows

    def count_events(row: int, events: list[Event], tokens: int) -> None:
        got[row] += len(events)

    for row in range(rows):
        prompt = [(7 * row + i) % VOCABULARY for i in range(PROMPT)]
        stream = LoopRow(partial(count_events, row))
        sampling = Sampling(temperature=temperature)
        sequence = Sequence(
            prompt,
            limit=1 << 30,
            stop_ids=frozenset(),
            min_tokens=0,
            sampler=SamplerState.of(sampling, prompt),
            parser=OutputParser(Words(), PLAIN),
            stream=stream,
            proposer=Proposer() if drafts else None,
        )
        engine.submit(sequence)
    for _ in range(WARM):
        engine.step()
        await asyncio.sleep(0)
    found = await timed(engine, count)
    assert min(got) >= count
    return found


async def timed(engine: TextEngine, count: int) -> list[dict[str, float]]:
    queue, found = mx.async_eval, []
    watched = watch(engine)
    gc.collect()
    gc.disable()
    for _ in range(count):
        watched.spent.clear()
        began = time.thread_time()
        engine.step()
        spent = dict(watched.spent)
        whole = time.thread_time() - began
        spent["wait"] = engine._clock.waited
        spent["read"] -= engine._clock.waited
        spent["rest"] = whole - sum(spent.values())
        spent["python"] = sum(spent[part] for part in PARTS)
        began = time.thread_time()
        # Once for what the step has sent, once for who was waiting for it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        spent["loop"] = time.thread_time() - began
        found.append(spent)
    gc.enable()
    mx.async_eval = queue
    return found


def launches(rows: int, layers: int) -> Counter[str]:
    """The operations of a compiled step and of drawing its tokens, greedy, by name."""
    decodes = forward("llama", layers, mx.compile)
    pages = 2 * WARM // PAGE
    for store in decodes.stores:
        store.resize(rows * pages)
    tables = [PageTable(range(row * pages, (row + 1) * pages)) for row in range(rows)]
    tokens = mx.zeros((rows,), mx.uint32)
    for step in range(1, WARM):
        mx.eval(tokens, decodes.state())
        decode = Decode(list(range(rows)), tables, [WARM + step] * rows, tokens)
        tokens = mx.argmax(decodes.run(decode, []), axis=-1)
    drawn = io.StringIO()
    mx.export_to_dot(drawn, tokens, *decodes.state())
    return Counter(re.findall(r'label ?="([A-Za-z]+)[^"]*", shape=rectangle', drawn.getvalue()))


def report_launches(rows: int) -> None:
    one, two = launches(rows, 1), launches(rows, 2)
    layer = two - one
    outside = one - layer
    for name, found in (("a layer", layer), ("outside of layers", outside)):
        views = sum(found[view] for view in VIEWS)
        norms = found["Square"]
        # A norm's cast and its last operation are counted, of which one would do.
        count = found.total() - views - sum(found[part] for part in NORM) - norms
        print(f"{rows} rows, {name}: {count} launches, {views} views")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--plain", action="store_true", help="compile no steps")
    parser.add_argument("--drafts", action="store_true", help="look for drafts")
    options = parser.parse_args()
    if options.model == "llama":
        report_launches(options.rows[-1])
    else:
        as_on_a_gpu()
    print("microseconds of processor time a step, smallest and median")
    found = {}
    for rows in options.rows:
        compile = (lambda function: function) if options.plain else mx.compile
        runs = forward(options.model, options.layers, compile)
        count, temperature = options.steps, options.temperature
        run = steps(runs, rows, count, temperature, drafts=options.drafts)
        found[rows] = asyncio.run(run)
    print(f"{'rows':10}" + "".join(f"{rows:>18}" for rows in found))
    for part in ("python", *PARTS, *APART):
        cells = ""
        for spent in found.values():
            times = sorted(step.get(part, 0.0) * 1e6 for step in spent)
            cells += f"{times[0]:9.0f}{times[len(times) // 2]:9.0f}"
        print(f"{part:10}{cells}", flush=True)


if __name__ == "__main__":
    main()
