"""`PagedKernels` in MLX operations: what a GPU's kernels must do, the slow way, on any device."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_manager.mlx_server.devices.attention.codes import decoded
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, CodedShape, Rotary
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion, TurnQueries
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape


class PortableWriter:
    """`Writer`, as `kernels.build_writer` would give it."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def write(self, k_pool, v_pool, k, v, slots):
        # Pools are written in place, so that whoever holds them sees it.
        put(k_pool, k.transpose(0, 2, 1, 3).reshape(-1, k.shape[1], k.shape[3]), slots)
        put(v_pool, v.transpose(0, 2, 1, 3).reshape(-1, v.shape[1], v.shape[3]), slots)
        return mx.zeros((1,), mx.int32)


class Portable:
    """`PagedKernels`, as `kernels.build` would give them."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.write = PortableWriter(shape.pools).write

    def plan(self, lengths, *, window=None, table_rows=None) -> Splits:
        rows = np.arange(len(lengths)) if table_rows is None else np.asarray(table_rows)
        items = np.zeros((max(len(rows), 1), 8), np.int32)
        items[: len(rows), 1] = rows
        return Splits(items=mx.array(items), divided=False)

    def rotate_and_write(self, qkv, rotations, head_norms, keys, values, slots, *, rotary):
        q, k, v = self._finished(qkv, rotations, head_norms, rotary)
        if not rotary.alone:
            put(keys, k, slots)
            put(values, v, slots)
        return q[:, :, None]

    def attend(
        self, q, k_pool, v_pool, table, lengths, dep, *,
        scale, splits, window=None, softcap=None, sinks=None,
    ):  # fmt: skip
        pages = np.array(table)[np.array(splits.items)[:, 1]]
        rows = [
            self._row(q[query], k_pool, v_pool, pages[query], length, scale, window, sinks, softcap)
            for query, length in enumerate(lengths.tolist())
        ]
        return mx.stack(rows)

    def attend_fused(
        self, qkv, rotation, norms, k_pool, v_pool, table, lengths, *,
        rotary, scale, splits, window=None, softcap=None, sinks=None,
    ):  # fmt: skip
        q, k, v = self._finished(qkv, rotation, norms, rotary)
        rows = []
        for row, length in enumerate(lengths.tolist()):
            pages = np.array(table)[row]
            if length:
                slot = int(self._slots(pages, length)[-1])
                k_pool[:, slot] = k[row]
                v_pool[:, slot] = v[row]
            own = q[row][:, None]
            how = (scale, window, sinks, softcap)
            rows.append(self._row(own, k_pool, v_pool, pages, length, *how))
        return mx.stack(rows).reshape(qkv.shape[0], -1)

    def _finished(self, qkv, rotation, norms, rotary):
        """Heads of q, k and v, (rows, heads, dim)."""
        of = self.shape
        heads = qkv.reshape(qkv.shape[0], -1, of.head_dim)
        places = 2 if rotary.gated else 1
        queries = places * of.q_heads
        q, k, v = mx.split(heads, [queries, queries + of.kv_heads], axis=1)
        q = q[:, ::places]
        if norms is not None:
            q = mx.fast.rms_norm(q, norms[0], rotary.epsilon)
            k = mx.fast.rms_norm(k, norms[1], rotary.epsilon)
        if rotary.values:
            v = mx.fast.rms_norm(v, None, rotary.epsilon)
        return turned(q, rotation, rotary), turned(k, rotation, rotary), v

    def _slots(self, pages, length):
        places, size = np.arange(length), self.shape.page_size
        return pages[places // size] * size + places % size

    def _row(self, q, k_pool, v_pool, pages, length, scale, window, sinks, softcap):
        """Attention of one query, (heads, 1, dim)."""
        if length == 0:
            return mx.zeros_like(q)
        slots = self._slots(pages, length)
        seen = mx.array(slots[-window:] if window else slots)
        if softcap is not None:
            keys, values = (
                mx.repeat(pool[:, seen], self.shape.group, axis=0) for pool in (k_pool, v_pool)
            )
            scores = softcap * mx.tanh(scale * q @ keys.swapaxes(1, 2) / softcap)
            return mx.softmax(scores, axis=-1) @ values
        return mx.fast.scaled_dot_product_attention(
            q[None], k_pool[None, :, seen], v_pool[None, :, seen], scale=scale, sinks=sinks
        )[0]


class PortableCoded:
    """`CodedKernels`, as `kernels.checked_coded` would give them."""

    def __init__(self, of: CodedShape) -> None:
        self.shape = of.attention
        self._portable = Portable(of.attention)
        self.plan = self._portable.plan

    def attend_codes(self, q, codes, scales, table, lengths, **how):
        pools = mx.split(decoded(codes, scales, q.dtype), 2)
        return self._portable.attend(q, *pools, table, lengths, None, **how)


class TraceableWriter:
    """`PortableWriter` for any slots, so that `mx.compile` can go through it."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def write(self, k_pool, v_pool, k, v, slots):
        for token in range(slots.size):
            slot = mx.maximum(slots[token], 0)
            for pool, new in ((k_pool, k), (v_pool, v)):
                row, place = divmod(token, new.shape[2])
                pool[:, slot] = mx.where(slots[token] >= 0, new[row, :, place], pool[:, slot])
        return mx.zeros((1,), mx.int32)


class Traceable(Portable):
    """`Portable` whose rows are attended to over all of their pages, whatever their lengths, so
    that `mx.compile` can go through it."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.write = TraceableWriter(shape.pools).write

    def attend(
        self, q, k_pool, v_pool, table, lengths, dep, *,
        scale, splits, window=None, softcap=None, sinks=None,
    ):  # fmt: skip
        pages, size = table[splits.items[: lengths.size, 1]], self.shape.page_size
        slots = (pages[..., None] * size + mx.arange(size)).reshape(lengths.size, -1)
        places, ends = mx.arange(slots.shape[1]), lengths[:, None]
        seen = places < ends
        if window is not None:
            seen = seen & (places >= ends - window)
        keys, values = k_pool[:, slots].swapaxes(0, 1), v_pool[:, slots].swapaxes(0, 1)
        mask = (seen | (ends == 0))[:, None, None]
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        return mx.where((ends == 0)[..., None, None], 0.0, out)


class PortableLatents:
    """`LatentKernels`, as `kernels.build_latents` would give them."""

    expansion: Expansion | None = None

    def __init__(self, shape: LatentShape) -> None:
        self.shape = shape

    @staticmethod
    def build(shape: LatentShape, *, traditional: bool):
        return PortableLatents(shape)

    @staticmethod
    def build_expanding(shape: LatentShape, *, traditional: bool):
        """As `build`, and latents may be expanded for prompts."""
        kernels = PortableLatents.build(shape, traditional=traditional)
        kernels.expansion = Expansion(shape, PortableChunks(shape.expanded), turning(shape))
        return kernels

    plan = Portable.plan

    def chunk_plan(self, runs) -> ChunkPlan:
        runs = [(run.first, run.count, run.row, run.length) for run in runs]
        return ChunkPlan(items=mx.array(runs, mx.int32), parts=0)

    def write(
        self, projected, rotation, norms, latents, turns, slots, *, traditional, epsilon
    ):  # fmt: skip
        of = self.shape
        ends = [of.queried, of.queried + of.rank, of.queried + of.rank + of.dims]
        queries, latent, key, _ = mx.split(projected, ends, axis=1)
        put(latents, mx.fast.rms_norm(latent, norms[1], epsilon)[:, None], slots)
        rotary = Rotary(of.dims, traditional, None)
        put(turns, turned(key[:, None], rotation[: len(key)], rotary), slots)
        return queries if norms[0] is None else mx.fast.rms_norm(queries, norms[0], epsilon)

    def attend(
        self, absorbed, queries, rotation, latents, turns, table, lengths, *,
        scale, splits, traditional,
    ):  # fmt: skip
        pages = np.array(table)[np.array(splits.items)[:, 1]]
        sees = np.array(lengths)[: absorbed.shape[1]].tolist()
        of_rows = list(zip(pages, sees, strict=False))
        pools = (latents, turns)
        return self._attended(absorbed, queries, rotation, pools, of_rows, scale, traditional)

    def attend_chunks(
        self, absorbed, queries, rotation, latents, turns, table, plan, *, scale, traditional
    ):
        table = np.array(table)
        of_rows = {}
        for first, count, row, length in np.array(plan.items).tolist():
            for number in range(count):
                of_rows[first + number] = (table[row], length + number)
        of_rows = [of_rows[number] for number in range(absorbed.shape[1])]
        pools = (latents, turns)
        return self._attended(absorbed, queries, rotation, pools, of_rows, scale, traditional)

    def _attended(self, absorbed, queries, rotation, pools, of_rows, scale, traditional):
        of, size = self.shape, self.shape.page_size
        tokens = absorbed.shape[1]
        own = queries.reshape(tokens, of.q_heads, -1)[..., of.plain :]
        own = turned(own, rotation[:tokens], Rotary(of.dims, traditional, None))
        rows = []
        for number, (pages, length) in enumerate(of_rows):
            if length == 0:
                rows.append(mx.zeros((of.q_heads, of.rank), of.dtype))
                continue
            places = np.arange(length)
            seen = mx.array(pages[places // size] * size + places % size)
            latent, key = pools[0][0, seen], pools[1][0, seen]
            scores = absorbed[:, number] @ latent.T + own[number] @ key.T
            weights = mx.softmax(scale * scores.astype(mx.float32), axis=-1).astype(of.dtype)
            rows.append(weights @ latent)
        return mx.stack(rows, axis=1)


def turning(of: LatentShape) -> TurnQueries:
    """By the definition."""
    width = of.expanded.head_dim

    def turn(queries, rotation, *, traditional):
        heads = queries.reshape(queries.shape[0], of.q_heads, -1)
        ends = turned(heads[..., of.plain :], rotation, Rotary(of.dims, traditional, None))
        empty = mx.zeros((*heads.shape[:2], width - heads.shape[2]), of.dtype)
        return mx.concatenate([heads[..., : of.plain], ends, empty], axis=2)[:, :, None]

    return turn


class PortableChunks:
    """`ChunkKernels` for as many key/value heads as there are of queries."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def plan(self, runs, window=None) -> ChunkPlan:
        return PortableLatents.chunk_plan(self, runs)

    def attend(self, q, k_pool, v_pool, table, plan, dep, *, scale):
        size, out = self.shape.page_size, mx.full(q.shape, mx.nan, q.dtype)
        for first, count, row, length in np.array(plan.items).tolist():
            places = np.arange(length + count - 1)
            slots = mx.array(np.array(table)[row][places // size] * size + places % size)
            own = q[first : first + count, :, 0].swapaxes(0, 1)[None].astype(mx.float32)
            keys, values = (pool[None, :, slots].astype(mx.float32) for pool in (k_pool, v_pool))
            mask = mx.array(np.tri(count, len(places), length - 1, dtype=bool))
            found = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=mask)
            out[first : first + count, :, 0] = found[0].swapaxes(0, 1)
        return out


def put(pool, tokens, slots):
    """Write (tokens, heads, dim) in place; a negative slot is skipped."""
    kept = [token for token, slot in enumerate(slots.tolist()) if slot >= 0]
    if kept:
        pool[:, slots[mx.array(kept)]] = tokens[mx.array(kept)].swapaxes(0, 1)


def plainly(function):
    """In place of `mx.compile`, which `Portable`'s loops over rows can't go through."""
    return function


class Replayed:
    """In place of `mx.compile`: what is put together for the first arrays is repeated for others of
    their shapes, operation by operation. `mx.compile` would have g++ compile those that it joins.

    times: how often it has been repeated.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._repeats = {}
        self.times = 0

    def __call__(self, *given):
        arrays = [array for _, array in tree_flatten(given) if array is not None]
        shapes = tuple((array.shape, array.dtype) for array in arrays)
        if shapes not in self._repeats:
            self._repeats[shapes] = self._put_together(given, arrays)
        self.times += 1
        found = iter(self._repeats[shapes](arrays))
        return tree_map(lambda leaf: None if leaf is None else next(found), self._made)

    def _put_together(self, given, arrays):
        def flat(*traced):
            own = iter(traced)
            as_given = tree_map(lambda leaf: None if leaf is None else next(own), given)
            made = self._function(*as_given)
            self._made = tree_map(lambda leaf: None if leaf is None else 0, made)
            return [leaf for _, leaf in tree_flatten(made) if leaf is not None]

        with TemporaryDirectory() as folder:
            mx.export_function(f"{folder}/step.mlxfn", flat, *arrays)
            return mx.import_function(f"{folder}/step.mlxfn")


def turned(x, rotation, rotary):
    dims, turn = rotary.dims, rotation[:, None]
    part = x[..., :dims].astype(mx.float32)
    if rotary.traditional:
        a, b, cosine, sine = part[..., ::2], part[..., 1::2], turn[..., ::2], turn[..., 1::2]
    else:
        a, b = mx.split(part, 2, axis=-1)
        cosine, sine = mx.split(turn, 2, axis=-1)
    pair = a * cosine - b * sine, a * sine + b * cosine
    joined = (
        mx.stack(pair, axis=-1).reshape(part.shape)
        if rotary.traditional
        else mx.concatenate(pair, axis=-1)
    )
    return mx.concatenate([joined.astype(x.dtype), x[..., dims:]], axis=-1)
