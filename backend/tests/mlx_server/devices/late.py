"""A GPU that runs what has been queued as late, and in as odd an order, as MLX's fences on Metal
allow.

There a launch comes after those whose results it is given, and after no others: neither the order
in which they were queued counts, nor who writes into whose inputs, nor `mx.depends`, which hands
its arrays on as they are. Here nothing is done to pages before the host waits for something that
comes after it, or chance has it done, in any order that the arrays allow. What a launch gives is
found when it is queued, as if all that comes before it had been done, and nothing else.

What comes before is read off MLX's own graph, where results of launches have names.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Portable
from mlx.utils import tree_flatten

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.metal.order import LaunchOrder
from mlx_manager.mlx_server.engine.step.host_tokens import HostTokens

KEPT = 150
"""Results whose names are remembered: those of the last few steps."""
LIKELY = 0.05
"""Probability that a write that has been put off is done when something else is queued."""
EDGE = re.compile(r'^("?)(\w+)"? -> ("?)(\w+)"?$')
PRIMITIVE = re.compile(r'(\d+) \[label ="([^"]*)"')

real_eval, real_synchronize = mx.eval, mx.synchronize
real_then, real_read = LaunchOrder.then, HostTokens.read


@dataclass
class Write:
    """A write that has been queued: what it comes after, and what goes where.

    content: for each pool, (tokens, heads, dim). slots: of the tokens; negative ones are skipped.
    """

    after: frozenset[str]
    pools: Sequence[mx.array]
    content: Sequence[mx.array]
    slots: list[int]

    def run(self) -> list[tuple[np.ndarray, int, np.ndarray]]:
        """Returns what was there before."""
        replaced = []
        for pool, content in zip(self.pools, self.content, strict=True):
            # The very memory that MLX reads.
            seen = np.array(pool, copy=False)
            for token, slot in zip(np.array(content), self.slots, strict=False):
                if slot >= 0:
                    replaced.append((seen, slot, seen[:, slot].copy()))
                    seen[:, slot] = token
        return replaced


@dataclass
class LateGPU:
    """folder: for the graphs."""

    folder: Path
    random: random.Random
    put_off: dict[str, Write] = field(default_factory=dict)
    _known: dict[str, tuple[mx.array, frozenset[str]]] = field(default_factory=dict)
    _count: int = 0

    def kernels(self) -> KernelSet:
        def build(shape: AttentionShape) -> LateKernels:
            return LateKernels(self, shape)

        return KernelSet(build, build_writer=lambda pools: LateWriter(self, pools))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have MLX queue, wait and read as on this GPU."""
        for name in ("eval", "async_eval", "synchronize"):
            patch.setattr(mx, name, getattr(self, name))

        def read(transfer: HostTokens) -> list[int]:
            self.eval(transfer.sent)
            return real_read(transfer)

        def then(order: LaunchOrder, result: mx.array) -> None:
            self.know(result, self.before([result]))
            real_then(order, result)

        patch.setattr(HostTokens, "read", read)
        patch.setattr(LaunchOrder, "then", then)

    # -- what comes after what -----------------------------------------------------------------

    def before(self, arrays: Iterable[mx.array]) -> frozenset[str]:
        """The launches that come before what takes `arrays`."""
        probes = {f"in{i}": mx.stop_gradient(array) for i, array in enumerate(arrays)}
        path = self.folder / "graph.dot"
        mx.export_to_dot(str(path), **probes, **{n: array for n, (array, _) in self._known.items()})
        found: set[str] = set()
        for name in reachable(path.read_text(), probes):
            if name in self._known:
                found |= {name} | self._known[name][1]
        return frozenset(found)

    def know(self, result: mx.array, after: frozenset[str]) -> str:
        """Give a result a name. MLX forgets what evaluated arrays were made of."""
        self._count += 1
        name = f"result{self._count}"
        self._known[name] = result, after
        for old in list(self._known)[:-KEPT]:
            if old not in self.put_off:
                del self._known[old]
        return name

    # -- launches ------------------------------------------------------------------------------

    @contextmanager
    def launch(self, *inputs: mx.array) -> Iterator[frozenset[str]]:
        """Enter a context in which a launch finds its `inputs`, and pages as they are by then."""
        after = self.before(inputs)
        self._run(name for name in list(self.put_off) if self.random.random() < LIKELY)
        replaced = []
        for name in self._in_order(after):
            replaced += self.put_off[name].run()
        try:
            real_eval(*inputs)
            yield after
        finally:
            for seen, slot, old in reversed(replaced):
                seen[:, slot] = old

    def write(self, write: Write, result: mx.array) -> mx.array:
        """Put a write off, which gives `result`."""
        real_eval(result, *write.pools, *write.content)
        self.put_off[self.know(result, write.after)] = write
        return result

    def eval(self, *trees: object) -> None:
        """As `mx.eval`: whoever waits for something waits for what comes before it."""
        arrays = [a for _, a in tree_flatten(list(trees)) if isinstance(a, mx.array)]
        names = [self.know(array, self.before([array])) for array in arrays]
        self._run(set().union(*(self._known[name][1] for name in names)))
        real_eval(*trees)

    def async_eval(self, *trees: object) -> None:
        """As `mx.async_eval`: what is queued is done when it is needed."""

    def synchronize(self, *stream: mx.Stream) -> None:
        self._run(self.put_off)
        real_synchronize(*stream)

    def _run(self, names: Iterable[str]) -> None:
        for name in self._in_order(names):
            self.put_off.pop(name).run()

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return the put-off writes among `names` and those before them, in some allowed order."""
        found: dict[str, None] = {}

        def add(some: Iterable[str]) -> None:
            some = [name for name in some if name in self.put_off and name not in found]
            for name in sorted(some, key=lambda _: self.random.random()):
                add(self.put_off[name].after)
                found[name] = None

        add(names)
        return list(found)


class LateWriter:
    """`Writer` on such a GPU."""

    def __init__(self, gpu: LateGPU, pools: Pools) -> None:
        self.gpu = gpu
        self.pools = pools

    def write(self, k_pool, v_pool, k, v, slots):
        own = [x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v)]
        with self.gpu.launch(*own, slots) as after:
            write = Write(after, (k_pool, v_pool), own, slots.tolist())
        return self.gpu.write(write, mx.zeros((1,), mx.int32))


class LateKernels(Portable):
    """`PagedKernels` on such a GPU."""

    def __init__(self, gpu: LateGPU, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.gpu = gpu
        self.write = LateWriter(gpu, shape.pools).write

    def rotate_and_write(self, qkv, rotations, head_norms, keys, values, slots, *, rotary):
        with self.gpu.launch(qkv, rotations, slots) as after:
            q, k, v = self._finished(qkv, rotations, head_norms, rotary)
            write = Write(after, (keys, values), (k, v), slots.tolist())
        return self.gpu.write(write, q[:, :, None])

    def attend(self, q, k_pool, v_pool, table, lengths, dep, **how):
        with self.gpu.launch(q, table, lengths, dep) as after:
            out = super().attend(q, k_pool, v_pool, table, lengths, dep, **how)
            real_eval(out)
        self.gpu.know(out, after)
        return out

    def attend_fused(self, qkv, rotation, norms, k_pool, v_pool, table, lengths, *, rotary, **how):
        with self.gpu.launch(qkv, rotation, table, lengths) as after:
            q, k, v = self._finished(qkv, rotation, norms, rotary)
            pages = np.array(table)
            slots = [
                int(self._slots(pages[row], end)[-1]) if end else -1
                for row, end in enumerate(lengths.tolist())
            ]
            real_eval(k_pool, v_pool, k, v)
            write = Write(after, (k_pool, v_pool), (k, v), slots)
            # It sees what it writes itself.
            replaced = write.run()
            none = mx.zeros((1,), mx.int32)
            out = super().attend(q[:, :, None], k_pool, v_pool, table, lengths, none, **how)
            out = out.reshape(qkv.shape[0], -1)
            real_eval(out)
            for seen, slot, old in reversed(replaced):
                seen[:, slot] = old
        return self.gpu.write(write, out)


def reachable(graph: str, names: Iterable[str]) -> set[str]:
    """The arrays that those of these names are made of, by what binds them."""
    made_by: dict[str, str] = {}
    inputs: dict[str, list[str]] = defaultdict(list)
    outputs: dict[str, int] = defaultdict(int)
    labels: dict[str, str] = {}
    for line in graph.splitlines():
        if (edge := EDGE.match(line)) is not None:
            of_array, source, _, target = edge.groups()
            if of_array:
                inputs[target].append(source)
            else:
                made_by[target] = source
                outputs[source] += 1
        elif (label := PRIMITIVE.search(line)) is not None:
            labels[label[1]] = label[2]
    found: set[str] = set()
    todo = list(names)
    while todo:
        array = todo.pop()
        if array not in found:
            found.add(array)
            if (by := made_by.get(array)) is not None:
                bound = inputs[by]
                todo += bound[: outputs[by]] if labels[by] == "Depends" else bound
    return found
