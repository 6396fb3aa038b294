"""Warpgroup matrix instructions of compute capability 9.0, as source text for the kernels.

Four warps multiply together: D, (64, N) float32, += A (64, 16) x B (16, N), with A and B in shared
memory, or A in registers. Each thread holds N / 2 elements of D, laid out as 16 x 8 tiles of `mma`
are: d[4 * j + e] is at row warp * 16 + lane / 4 + e / 2 * 8, column j * 8 + lane % 4 * 2 + e % 2. A
in registers is laid out as mma's 16 x 16 A is (PTX ISA, asynchronous warpgroup-level matrix
instructions).

Tiles in shared memory have rows of 128 bytes, swizzled: 16-byte piece p of row r lies at piece
p ^ r % 8, and the tile begins at a multiple of 1 024 bytes. A tile's rows are either the 64
elements of K of one row of A or column of B, or (`across`) 64 columns of B for one element of K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HOPPER_SOURCE = Path(__file__).with_name("hopper.cu")
TILE_ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class GroupProduct:
    """One warpgroup instruction.

    columns: N, a multiple of 8. a_in_registers: A is in registers, not in shared memory. across:
    layout of B in its tile, see above.
    """

    columns: int
    a_in_registers: bool = False
    across: bool = False

    def text(self, element: str) -> str:
        """Return the function `multiply_group`, or `multiply_group_across`, as source text.

        element: type of the matrices, "bf16" or "f16".
        """
        count = self.columns // 2
        type_name = {"bf16": "__nv_bfloat16", "f16": "__half"}[element]
        numbers = ", ".join(f"%{i}" for i in range(count))
        outs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        if self.a_in_registers:
            given = "const unsigned (&a)[4], "
            a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
            ins = ", ".join(f'"r"(a[{i}])' for i in range(4))
            following, turned = count + 4, f"{int(self.across)}"
        else:
            given, a, ins = "unsigned long long a, ", f"%{count}", '"l"(a)'
            following, turned = count + 1, f"0, {int(self.across)}"
        name = "multiply_group_across" if self.across else "multiply_group"
        return (
            f"__device__ __forceinline__ void {name}(float (&d)[{count}], {given}"
            f"unsigned long long b, bool add, const {type_name}*) {{\n"
            "asm volatile(\n"
            f'"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{following + 1}, 0;\\n"\n'
            f'"wgmma.mma_async.sync.aligned.m64n{self.columns}k16.f32.{element}.{element} "\n'
            f'"{{{numbers}}}, {a}, %{following}, p, 1, 1, {turned};\\n}}\\n"\n'
            f': {outs} : {ins}, "l"(b), "r"(int(add)));\n'
            "}\n"
        )


def instructions(products: Iterable[GroupProduct]) -> str:
    """Return the source of `products`, for both element types, in the kernels' namespace."""
    text = "".join(p.text(element) for p in products for element in ("bf16", "f16"))
    return f"#ifndef EMULATED\nnamespace kernels {{\n{text}}}\n#endif\n"
