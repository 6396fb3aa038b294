"""A kernel's declaration, the text that is derived from it, and the name that MLX keeps it by."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_manager.mlx_server.devices.kernel import KernelName, OptionalArgument, Size, Struct, source
from mlx_manager.mlx_server.devices.metal.launch import MetalSource

TEXT = MetalSource(
    name="add",
    files=("#define ONE 1\n",),
    function="add",
    constants=(mx.bfloat16, 3, True, KernelName("Kind", (mx.float32, False))),
    arguments=("x", Size("x", 1, times=8, over=2), OptionalArgument("bias"), 0.5, None, 2, "out"),
    inputs=("x",),
    outputs=("out",),
)


def test_the_text_is_a_call_with_constants_and_arguments() -> None:
    assert TEXT.body == (
        "kernels::add<bfloat16_t, 3, true, kernels::Kind<float, false>>"
        "(x, x_shape[1] * 8 / 2, nullptr, 0.5f, nullptr, 2, out);"
    )
    given = replace(TEXT, inputs=("x", "bias"))
    assert "x_shape[1] * 8 / 2, bias, 0.5f" in given.body


def test_arguments_are_made_of_others() -> None:
    link = Struct(
        KernelName("Link", (mx.float16,)), ("x", Struct(None, (1, OptionalArgument("bias"))))
    )
    made = Struct(KernelName("fresh", (4,)), ("x",), called=True)
    text = replace(TEXT, constants=(), arguments=(link, made, "out"))
    assert text.body == (
        "kernels::add(kernels::Link<float16_t>{x, {1, nullptr}}, kernels::fresh<4>(x), out);"
    )


def test_a_function_may_belong_to_a_class_and_have_memory_that_threads_share() -> None:
    text = replace(
        TEXT,
        within=KernelName("Adder", (4,)),
        constants=(),
        arguments=("scratch", "newest"),
        scratch=KernelName("Scratch", (2,)),
        newest=(mx.float16, 8),
    )
    assert text.body == (
        "threadgroup kernels::Scratch<2> shared;\n"
        "threadgroup kernels::Scratch<2>* scratch = &shared;\n"
        "threadgroup float16_t newest[8];\n"
        "kernels::Adder<4>::add(scratch, newest);"
    )


def test_a_dimension_of_an_argument_within_another_is_found() -> None:
    text = replace(TEXT, inputs=("y", "x"), arguments=(Struct(None, (Size("x", 1),)), Size("y", 0)))
    assert text.sizes == [(0, 0), (1, 1)]


@pytest.mark.parametrize("argument", ["y", np.int64(3)], ids=str)
def test_an_argument_that_is_nothing_is_refused(argument) -> None:
    with pytest.raises(ValueError, match=f"add: {argument} is neither an input nor an output"):
        _ = replace(TEXT, arguments=(argument,)).body


def test_a_number_of_numpys_is_a_number() -> None:
    assert replace(TEXT, constants=(), arguments=(np.float64(0.5),)).body == "kernels::add(0.5f);"


def test_a_kernel_whose_text_has_changed_has_another_name() -> None:
    changed = [replace(TEXT, files=("#define ONE 2\n",)), replace(TEXT, function="addition")]
    names = {text.unique_name for text in (TEXT, *changed)}
    assert len(names) == 3
    assert TEXT.unique_name == replace(TEXT).unique_name


def test_comments_and_indentation_of_source_files_are_left_out(tmp_path) -> None:
    first, second = tmp_path / "first.cu", tmp_path / "second.cu"
    first.write_text("// What it is for.\nint one() {\n  return 1;  // always\n}\n\n")
    second.write_text("int two();")
    assert source(first) == "int one() {\nreturn 1;  // always\n}\n"
    assert replace(TEXT, files=(first, second, "int three();\n")).header == (
        "int one() {\nreturn 1;  // always\n}\nint two();\nint three();\n"
    )
