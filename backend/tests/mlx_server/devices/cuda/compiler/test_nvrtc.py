"""What stands between MLX and NVRTC, with NVIDIA's own compiler, which needs no GPU."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from jit_module import HOPPER, Compiled, Jit, text_of

from mlx_manager.mlx_server.devices.cuda.compiler import nvrtc
from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import Code, Compiler, Shelf
from mlx_manager.mlx_server.devices.kernel import KernelSource

PLAIN = "out[0] = float(x[0]) + float(x_shape[1]) + float(x_strides[0]);"
TWICE = "__device__ float twice(float x) { return 2 * x; }\n" + "// And so on.\n" * 100
COMPILED = 3
"""The number of the call that compiles."""


class OneKernel(Jit):
    """A library of its own, in which nothing has been redirected yet; asks for kernels `one`."""

    def one(self, body: str, architecture: str = HOPPER, header: str = "") -> Compiled:
        source = KernelSource("one", header, body, ("x", "y"), ("out",))
        text = text_of(source, (mx.bfloat16, mx.uint32), (mx.float32,))
        return self.compile(text, "custom_kernel_one", architecture)


@pytest.fixture
def jit(tmp_path) -> OneKernel:
    return OneKernel(tmp_path / "libjit.so")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Compiled:
    """`PLAIN` as MLX gets it from a library in which nothing has been redirected."""
    return OneKernel(tmp_path_factory.mktemp("plain") / "libjit.so").one(PLAIN)


@pytest.fixture
def shelf(tmp_path) -> Path:
    return tmp_path / "shelf"


def answered(jit: OneKernel, shelf: Path) -> Compiler:
    compiler = nvrtc.answer(jit.path, Shelf(shelf))
    assert compiler is not None
    return compiler


def stored(shelf: Path) -> Sequence[Path]:
    return sorted(shelf.iterdir())


def test_a_kernel_is_the_same_instructions_without_mlx_s_headers(jit, shelf, plain):
    assert plain.failed == 0
    compiler = answered(jit, shelf)
    ours = jit.one(PLAIN)
    assert ours.failed == 0
    assert len(ours.code) < len(plain.code)
    assert instructions(ours.code, ours.said) == instructions(plain.code, plain.said)
    assert compiler.programs == 0


def test_code_is_kept_for_the_next_process_and_the_user_alone(jit, shelf, monkeypatch):
    compiler = answered(jit, shelf)
    first = jit.one(PLAIN)
    (file,) = stored(shelf)
    assert (shelf.stat().st_mode | file.stat().st_mode) & 0o077 == 0
    monkeypatch.setattr(Compiler, "_ours", None)
    assert jit.one(PLAIN) == first
    assert stored(shelf) == [file]
    assert compiler.programs == 0


@pytest.mark.parametrize("spoiled", [b"", b"short", b"x" * 5000])
def test_a_file_that_was_spoiled_is_made_anew(jit, shelf, spoiled):
    compiler = answered(jit, shelf)
    first = jit.one(PLAIN)
    (file,) = stored(shelf)
    good = file.read_bytes()
    file.write_bytes(spoiled)
    assert jit.one(PLAIN) == first
    assert file.read_bytes() == good
    assert compiler.programs == 0


def test_other_text_another_gpu_and_other_options_have_files_of_their_own(jit, shelf):
    compiler = answered(jit, shelf)
    seen = [
        jit.one(PLAIN),
        jit.one(PLAIN + " out[1] = 1;"),
        jit.one(PLAIN, architecture="sm_80"),
    ]
    assert all(one.failed == 0 for one in seen)
    assert len({one.code for one in seen}) == len(stored(shelf)) == 3
    assert compiler.programs == 0


def test_a_kernel_that_needs_mlx_s_headers_gets_them_and_is_kept_too(jit, shelf, monkeypatch):
    compiler = answered(jit, shelf)
    first = jit.one("out[0] = only_in_utils();")
    assert first.failed == 0
    assert len(stored(shelf)) == 1
    monkeypatch.setattr(Compiler, "_ours", None)
    assert jit.one("out[0] = only_in_utils();") == first
    assert compiler.programs == 0


def test_what_does_not_compile_says_so_as_before(jit, shelf):
    plain = jit.one("out[0] = nowhere;")
    assert plain.failed == COMPILED
    compiler = answered(jit, shelf)
    ours = jit.one("out[0] = nowhere;")
    assert ours == plain
    assert 'identifier "nowhere" is undefined' in ours.said
    assert not shelf.exists()
    assert compiler.programs == 0


@pytest.mark.parametrize(("release", "threads"), [((13, 0), 1), ((12, 9), 0)])
def test_mlx_s_own_kernels_pass_and_are_compiled_by_all_cores(
    jit, shelf, plain, monkeypatch, release, threads
):
    monkeypatch.setattr(nvrtc, "MLX_HEADERS", b"as no text begins")
    compiler = answered(jit, shelf)
    monkeypatch.setattr(Compiler, "_release", release)
    call, wanted = compiler._call, []

    def noting(name, *arguments):
        if name == "nvrtcCompileProgram":
            _, count, options = arguments
            at = options if isinstance(options, int) else ctypes.addressof(options)
            pointers = (ctypes.c_char_p * count).from_address(at)
            wanted.extend(pointers)
        return call(name, *arguments)

    monkeypatch.setattr(compiler, "_call", noting)
    ours = jit.one(PLAIN)
    assert instructions(ours.code, ours.said) == instructions(plain.code, plain.said)
    assert wanted.count(nvrtc.ALL_CORES) == threads
    assert ours.failed == 0
    assert not shelf.exists()
    assert compiler.programs == 0


def test_ptx_is_left_to_mlx(jit, shelf):
    compiler = answered(jit, shelf)
    assert b".target sm_90" in jit.one(PLAIN, architecture="compute_90").code
    assert not shelf.exists()
    assert compiler.programs == 0


@pytest.mark.parametrize("place", ["a file", "none"])
def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(jit, tmp_path, place):
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file" / "shelf", "none": None}[place]
    compiler = nvrtc.answer(jit.path, Shelf(folder))
    assert compiler is not None
    assert jit.one(PLAIN).failed == 0


def test_a_library_that_is_not_loaded_yet_is_loaded(jit, shelf, tmp_path):
    other = tmp_path / "never_loaded_before.so"
    shutil.copy(jit.path, other)
    assert nvrtc.answer(other, Shelf(shelf)) is not None


@pytest.mark.skipif(mx.cuda.is_available(), reason="needs a build of MLX without CUDA")
def test_a_library_without_nvrtc_is_left_alone():
    assert nvrtc.answer_mlx() is None
    assert nvrtc.abbreviated(TWICE) == TWICE


@pytest.mark.parametrize("body", ["out[0] = twice(x[0]);", "out[0] = only_in_utils() * twice(1);"])
def test_an_abbreviated_text_is_compiled_and_kept_as_if_it_stood_there(
    jit, shelf, monkeypatch, body
):
    compiler = answered(jit, shelf)
    plain = jit.one(body, header=TWICE)
    assert plain.failed == 0
    monkeypatch.setattr(nvrtc, "answer_mlx", lambda: compiler)
    short = nvrtc.abbreviated(TWICE)
    assert short != TWICE
    monkeypatch.setattr(Compiler, "_ours", None)
    assert jit.one(body, header=short) == plain
    assert len(stored(shelf)) == 1
    assert compiler.programs == 0


def test_no_text_is_not_abbreviated(monkeypatch):
    monkeypatch.setattr(nvrtc, "answer_mlx", object)
    assert nvrtc.abbreviated("") == ""


def test_what_was_packed_is_unpacked():
    code = Code(b"\x7fELF\n\0code", {b"a::b": b"_Z1a"})
    assert Code.unpacked(code.packed()) == code


def instructions(cubin: bytes, mangled: str) -> bytes:
    """The section of a cubin that holds a kernel's instructions (ELF64)."""
    return section(cubin, f".text.{mangled}")


def section(elf: bytes, wanted: str) -> bytes:
    def number(at: int, size: int) -> int:
        return int.from_bytes(elf[at : at + size], "little")

    table, size, count, names_at = number(40, 8), number(58, 2), number(60, 2), number(62, 2)
    headers = [table + size * i for i in range(count)]
    names = number(headers[names_at] + 24, 8)
    for header in headers:
        start = names + number(header, 4)
        if elf[start : elf.index(b"\0", start)].decode() == wanted:
            offset, length = number(header + 24, 8), number(header + 32, 8)
            return elf[offset : offset + length]
    raise AssertionError(f"there is no section {wanted}")
