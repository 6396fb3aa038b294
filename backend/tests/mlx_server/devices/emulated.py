"""A tiny model, and compilers that let the kernels' very source run on a CPU: g++ compiles it
against emulated GPU languages.

For each input the functions take its pointer, then its shape and strides where the source names
them, then the outputs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
import pytest
from linux import skip_without_linux
from nvidia_compiler import HOPPER, installed_nvrtc
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
from mlx_manager.mlx_server.devices.cuda.compiler.launch import C_TYPES as CUDA_TYPES
from mlx_manager.mlx_server.devices.cuda.compiler.launch import text_of
from mlx_manager.mlx_server.devices.kernel import KernelSource

Compile = Callable[[Sequence[tuple]], "Library"]
Accepts = Callable[[Sequence[tuple]], None]

EMULATION = Path(__file__).parent / "emulation"
METAL_TYPES = {
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int8: "int8_t",
}


@dataclass(frozen=True)
class Entry:
    """One kernel to compile, with the dtypes that its arrays will have."""

    source: KernelSource
    inputs: Sequence[mx.Dtype]
    outputs: Sequence[mx.Dtype]


class Library:
    """Compiled kernels; `call` runs one as `mx.fast`'s custom kernels would."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._library = ctypes.CDLL(str(path))
        self._entries = entries

    def inputs(self, index: int) -> tuple[str, ...]:
        """Return the names of a kernel's inputs, in order."""
        return self._entries[index].source.inputs

    def call(
        self,
        index: int,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        grid: tuple[int, int, int],
        group: tuple[int, int, int],
    ) -> None:
        arguments: list[ctypes.c_void_p] = []
        keep = []
        for name, array in zip(self.inputs(index), inputs, strict=True):
            arguments.append(array.ctypes.data_as(ctypes.c_void_p))
            strides = np.array(array.strides, np.int64) // array.itemsize
            for suffix, numbers in (
                ("_shape", np.array(array.shape, np.int32)),
                ("_strides", strides),
            ):
                if name + suffix in self._entries[index].source.body:
                    padded = np.zeros(8, numbers.dtype)
                    padded[: len(numbers)] = numbers
                    keep.append(padded)
                    arguments.append(padded.ctypes.data_as(ctypes.c_void_p))
        arguments += [array.ctypes.data_as(ctypes.c_void_p) for array in outputs]
        self._library[f"kernel_{index}"](*arguments, *(ctypes.c_int(n) for n in (*grid, *group)))


@pytest.fixture(scope="session", autouse=True)
def _products_of_a_server() -> None:
    """On a CPU: those that a process has, too, where another test has loaded a model before."""
    load_fast_blas()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama; what it holds stays as it is."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def compile_cuda(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    def compile_entries(entries: Sequence[tuple]) -> Library:
        directory = tmp_path_factory.mktemp("cuda")
        views = ("Shape", "Strides")
        return _compile(directory, _entries(entries), "cuda", "Index", CUDA_TYPES, views)

    return compile_entries


@pytest.fixture(scope="session")
def compile_metal(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    def compile_entries(entries: Sequence[tuple]) -> Library:
        directory = tmp_path_factory.mktemp("metal")
        views = ("const int*", "const int64_t*")
        return _compile(directory, _entries(entries), "metal", "uint3", METAL_TYPES, views)

    return compile_entries


@pytest.fixture(scope="session")
def nvidia_accepts() -> Accepts:
    """Have NVIDIA's own compiler compile kernels, for compute capability 9.0."""
    compiler = installed_nvrtc()

    def accept(entries: Sequence[tuple]) -> None:
        for source, inputs, outputs in entries:
            _, text = text_of(source, (tuple(inputs), tuple(outputs)))
            assert compiler.compile(text, HOPPER)

    return accept


def _entries(entries: Sequence[tuple]) -> list[Entry]:
    return [Entry(*entry) for entry in entries]


def _compile(
    directory: Path,
    entries: Sequence[Entry],
    language: str,
    index: str,
    types: dict[mx.Dtype, str],
    views: tuple[str, str],
) -> Library:
    skip_without_linux("the GPU's threads are emulated by ucontext")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: the GPU sources can't be compiled for a CPU")
    parts = [f'#include "{language}.h"', "#define threadgroup", entries[0].source.header]
    parts += ["#undef threadgroup", "#define threadgroup static"]
    parts += [_function(i, entry, index, types, views) for i, entry in enumerate(entries)]
    path = directory / "kernels.so"
    folder = _compiled_language(compiler, language, directory.parent)
    path.write_bytes(_compiled(compiler, "\n".join(parts), folder))
    return Library(path, entries)


# Unfortified: that checks jumps to stay on one stack, and each emulated thread has its own.
FLAGS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w")
EMULATED = "emulated.so"


@cache
def _compiled_language(compiler: str, language: str, parent: Path) -> Path:
    """A folder with a compiled header, and beside it the library of what is the same for all
    kernels: most of what each would take to compile."""
    # Of the processes that run tests beside each other, the first compiles it for all.
    folder = (parent.parent if "PYTEST_XDIST_WORKER" in os.environ else parent) / language
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not (folder / EMULATED).exists():
            header = [compiler, "-x", "c++-header", *FLAGS, str(EMULATION / f"{language}.h")]
            subprocess.run([*header, "-o", str(folder / f"{language}.h.gch")], check=True)
            sources = [str(EMULATION / f"{name}.cpp") for name in ("group", language)]
            library = [compiler, *FLAGS, *sources, "-o", str(folder / "half")]
            subprocess.run(library, check=True)
            (folder / "half").rename(folder / EMULATED)
    return folder


@cache
def _compiled(compiler: str, text: str, language: Path) -> bytes:
    """The file of a library. Many tests differ only in what they give a kernel; each has a copy."""
    flags = [*FLAGS, f"-I{language}", f"-I{EMULATION}"]
    with TemporaryDirectory() as folder:
        source, path = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        source.write_text(text)
        command = [compiler, *flags, str(source), str(language / EMULATED), "-o", str(path)]
        subprocess.run(command, check=True)
        return path.read_bytes()


def _function(
    number: int,
    entry: Entry,
    index: str,
    types: dict[mx.Dtype, str],
    views: tuple[str, str],
) -> str:
    parameters, locals_ = [], []
    for name, dtype in zip(entry.source.inputs, entry.inputs, strict=True):
        parameters.append(f"const {types[dtype]}* {name}")
        for suffix, view in zip(("_shape", "_strides"), views, strict=True):
            if name + suffix in entry.source.body:
                parameters.append(f"const void* {name}{suffix}_")
                pointer = f"{name}{suffix}_"
                value = f"({view}){pointer}" if "*" in view else f"*(const {view}*){pointer}"
                locals_.append(f"auto {name}{suffix} = {value};")
    if index == "Index":
        locals_ += [
            f"const int {name}_shape_{axis} = {name}_shape[{axis}];"
            for name, axis in ((entry.source.inputs[i], axis) for i, axis in entry.source.sizes)
        ]
    for name, dtype in zip(entry.source.outputs, entry.outputs, strict=True):
        parameters.append(f"{types[dtype]}* {name}")
    numbers = "int gx, int gy, int gz, int tx, int ty, int tz"
    sizes = "{unsigned(gx), unsigned(gy), unsigned(gz)}, {unsigned(tx), unsigned(ty), unsigned(tz)}"
    if index == "Index":
        sizes = "{gx, gy, gz}, {tx, ty, tz}"
    return (
        f'extern "C" void kernel_{number}({", ".join(parameters)}, {numbers}) {{\n'
        f"{' '.join(locals_)}\n"
        f"launch({sizes}, [=] {{\n{entry.source.body}\n}});\n}}"
    )
