"""clang's front end for Metal sources: what it says of them, without a Mac.

Runs itself in `.venv-clients/clang`, where the library is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = HERE.parents[3] / ".venv-clients" / "clang" / "bin" / "python"
PRELUDE = HERE / "emulation" / "front_end.h"
FLAGS = [
    *("-x", "c++", "-std=c++14", "--target=x86_64-unknown-linux-gnu", "-fsyntax-only"),
    *("-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"),
    # Attributes such as [[buffer(0)]] are Metal's own, and what is declared above has no bodies.
    *("-Wno-unknown-attributes", "-Wno-undefined-internal", "-Wno-unused-function"),
    *("-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-unused-const-variable"),
    *("-Wno-unknown-pragmas", "-Wno-sign-compare"),
]
# Those of a kernel that MLX declares where its text names them (mlx/backend/common/metal_kernel.cpp).
ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "thread_position_in_grid": "uint3",
    "thread_index_in_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
}
LOCAL = re.compile(r"(^|[;{]\s*)threadgroup (?=[\w:<>, ]+ \w+(\[[^;]*\])?;)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A kernel as MLX gives it to Metal's compiler.

    inputs: of each its name, its elements' type, and whether it is one of fewer than 8 elements,
    which come in another address space. outputs: names and types.
    """

    name: str
    body: str
    inputs: Sequence[tuple[str, str, bool]]
    outputs: Sequence[tuple[str, str]]

    @property
    def text(self) -> str:
        parameters = []
        for name, element, few in self.inputs:
            space = "constant" if few else "device"
            parameters.append(f"const {space} {element}* {name}")
            if f"{name}_shape" in self.body:
                parameters.append(f"const constant int* {name}_shape")
            if f"{name}_strides" in self.body:
                parameters.append(f"const constant int64_t* {name}_strides")
        parameters += [f"device {element}* {name}" for name, element in self.outputs]
        numbered = [f"{text} [[buffer({i})]]" for i, text in enumerate(parameters)]
        numbered += [
            f"{kind} {name} [[{name}]]" for name, kind in ATTRIBUTES.items() if name in self.body
        ]
        # Of a function's own variables clang takes none in an address space, but for those that are
        # a namespace's.
        body = LOCAL.sub(r"\1extern threadgroup ", self.body)
        joined = ", ".join(numbered)
        declared = f"namespace of_{self.name} {{ [[kernel]] void {self.name}({joined})"
        return f"{declared} {{\n{body}\n}} }}\n"


@dataclass(frozen=True)
class Verdict:
    """said: what clang complains of. loops: those that keep arrays out of registers."""

    said: list[str]
    loops: list[str]


def judged(header: str, *kernels: Kernel) -> Verdict:
    """Return the verdict on kernels with the same header."""
    asked = subprocess.run(
        [str(PYTHON), __file__],
        input="".join([header, "\n", *(kernel.text for kernel in kernels)]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return Verdict(**json.loads(asked.stdout))


# ---------------------------------------------------------------------------------------------
# In the other environment
# ---------------------------------------------------------------------------------------------


def main() -> None:
    from clang.cindex import Index

    text, flags = sys.stdin.read(), [*FLAGS, "-include", str(PRELUDE)]
    lines = text.splitlines()
    unit = Index.create().parse("header", args=flags, unsaved_files=[("header", text)])
    said = [
        f"{complaint.spelling}: {lines[complaint.location.line - 1]}"
        for complaint in unit.diagnostics
        if complaint.severity > 1
    ]
    loops = [loop for node in unit.cursor.get_children() for loop in open_loops(node)]
    json.dump({"said": said, "loops": loops}, sys.stdout)


def open_loops(node: Any) -> Iterator[str]:
    """Loops over local arrays whose bounds the compiler does not know."""
    from clang.cindex import CursorKind

    if node.kind is CursorKind.FOR_STMT:
        # What declares, what ends it, what advances, and what is done.
        children = list(node.get_children())
        if len(children) == 4:
            first, ends, _, done = children
            counted = {n.spelling for n in first.walk_preorder() if n.kind is CursorKind.VAR_DECL}
            if not all(map(is_known, refs(ends, but=counted))):
                arrays = list(indexed(done, counted))
                if arrays:
                    yield f"{node.location.line}: {', '.join(sorted(set(arrays)))}"
    for child in node.get_children():
        yield from open_loops(child)


def refs(node: Any, but: set[str]) -> list[Any]:
    from clang.cindex import CursorKind

    return [
        n.referenced
        for n in node.walk_preorder()
        if n.kind is CursorKind.DECL_REF_EXPR and n.spelling not in but and n.referenced is not None
    ]


def is_known(declared: Any) -> bool:
    """Return whether what is declared is a constant to the compiler."""
    from clang.cindex import CursorKind

    if declared.kind in (CursorKind.TEMPLATE_NON_TYPE_PARAMETER, CursorKind.ENUM_CONSTANT_DECL):
        return True
    return "constexpr" in {token.spelling for token in declared.get_tokens()}


def indexed(node: Any, by: set[str]) -> Iterator[str]:
    """Local arrays that are indexed by one of these variables."""
    from clang.cindex import CursorKind

    for n in node.walk_preorder():
        if n.kind is CursorKind.ARRAY_SUBSCRIPT_EXPR:
            array, place = list(n.get_children())
            names = {
                r.spelling for r in place.walk_preorder() if r.kind is CursorKind.DECL_REF_EXPR
            }
            base = [r for r in array.walk_preorder() if r.kind is CursorKind.DECL_REF_EXPR]
            if base and names & by and base[0].referenced.kind is CursorKind.VAR_DECL:
                kind = base[0].referenced.type.spelling
                if "[" in kind and "address_space" not in kind:
                    yield base[0].spelling


if __name__ == "__main__":
    main()
