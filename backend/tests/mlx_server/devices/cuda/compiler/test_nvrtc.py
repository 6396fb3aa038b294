"""NVIDIA's own compiler, which needs no GPU, and the code that it made, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvidia_compiler import HOPPER, installed_fatbin, installed_nvrtc

from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import (
    NVRTC,
    CompiledCode,
    include_folders,
)
from mlx_manager.mlx_server.devices.kept import Kept

TEXT = 'extern "C" __global__ void one(float* out) { out[0] = 1; }\n'
STEPS = "".join(f"if (out[{n}] > {n}) out[{n}] = {n + 1};\n" for n in range(200))
LONG = f'extern "C" __global__ void long_one(float* out) {{\n{STEPS}}}\n'


@pytest.fixture(scope="module")
def compiler() -> NVRTC:
    return installed_nvrtc()


def stored(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_code_is_machine_code_with_the_kernel_by_its_name(compiler: NVRTC) -> None:
    code = compiler.compile(TEXT, HOPPER)
    assert code.startswith(b"\x7fELF")
    assert b".text.one" in code


def test_headers_of_cuda_are_found_in_the_folders_given(compiler: NVRTC) -> None:
    assert compiler.compile(f"#include <cuda_bf16.h>\n{TEXT}", HOPPER)


def test_a_text_that_does_not_compile_says_where(compiler: NVRTC) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)does not compile.*nowhere"):
        compiler.compile(TEXT.replace("1", "nowhere"), HOPPER)


def test_code_is_kept_for_the_next_process_and_the_user_alone(
    compiler: NVRTC, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    first = CompiledCode(compiler, Kept(folder)).of(TEXT, HOPPER)
    (file,) = stored(folder)
    assert (folder.stat().st_mode | file.stat().st_mode) & 0o077 == 0
    written = file.stat().st_mtime_ns
    assert CompiledCode(compiler, Kept(folder)).of(TEXT, HOPPER) == first
    assert stored(folder) == [file]
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("spoiled", [b"", b"short", b"x" * 5000])
def test_a_file_that_was_spoiled_is_made_anew(
    compiler: NVRTC, tmp_path: Path, spoiled: bytes
) -> None:
    code = CompiledCode(compiler, Kept(tmp_path))
    first = code.of(TEXT, HOPPER)
    (file,) = stored(tmp_path)
    good = file.read_bytes()
    file.write_bytes(spoiled)
    assert code.of(TEXT, HOPPER) == first
    assert file.read_bytes() == good


@pytest.mark.parametrize(
    ("text", "architecture"), [(TEXT.replace("1", "2"), HOPPER), (TEXT, "sm_80")]
)
def test_another_text_or_architecture_has_code_of_its_own(
    compiler: NVRTC, tmp_path: Path, text: str, architecture: str
) -> None:
    code = CompiledCode(compiler, Kept(tmp_path))
    assert code.of(TEXT, HOPPER) != code.of(text, architecture)
    assert len(stored(tmp_path)) == 2


def test_without_a_folder_that_can_be_written_to_code_is_made_each_time(
    compiler: NVRTC, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "kernels"):
        assert CompiledCode(compiler, Kept(folder)).of(TEXT, HOPPER).startswith(b"\x7fELF")


def test_a_toolkit_that_the_owner_names_gives_its_headers(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tmp_path / "include" in include_folders()


def test_code_is_kept_compressed_where_there_is_nvidia_s_library(
    compiler: NVRTC, tmp_path: Path
) -> None:
    plain = CompiledCode(compiler, Kept(tmp_path)).of(LONG, HOPPER)
    small = CompiledCode(compiler, Kept(tmp_path), installed_fatbin()).of(LONG, HOPPER)
    assert len(small) < len(plain) / 2
    assert len(stored(tmp_path)) == 2
