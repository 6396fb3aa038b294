"""A kernel's source, and the name that MLX keeps it by."""

from __future__ import annotations

from dataclasses import replace

from mlx_manager.mlx_server.devices.kernel import KernelSource, source

TEXT = KernelSource("add", "#define ONE 1\n", "out[0] = x[0] + ONE;", ("x",), ("out",))


def test_a_kernel_whose_text_has_changed_has_another_name() -> None:
    changed = [replace(TEXT, header="#define ONE 2\n"), replace(TEXT, body="out[0] = ONE;")]
    names = {text.unique_name for text in (TEXT, *changed)}
    assert len(names) == 3
    assert TEXT.unique_name == replace(TEXT).unique_name


def test_comments_and_indentation_of_source_files_are_left_out(tmp_path) -> None:
    first, second = tmp_path / "first.cu", tmp_path / "second.cu"
    first.write_text("// What it is for.\nint one() {\n  return 1;  // always\n}\n\n")
    second.write_text("int two();")
    assert source(first, second) == "int one() {\nreturn 1;  // always\n}\nint two();\n"
