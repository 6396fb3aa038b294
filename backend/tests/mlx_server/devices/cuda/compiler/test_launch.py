"""Text of a kernel, as it is compiled for the types of a launch."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaSource, text_of
from mlx_manager.mlx_server.devices.kernel import Size

SOURCE = CudaSource(
    name="sums",
    files=("__device__ int one() { return 1; }\n",),
    function="sum",
    arguments=("x", Size("y", 0), Size("x", 1), Size("x", 1, over=2), "out"),
    inputs=("x", "y"),
    outputs=("out",),
)
TYPES = (mx.bfloat16, mx.uint32), (mx.float32,)


def test_the_dimensions_that_are_arguments_are_numbers_after_the_arrays() -> None:
    name, text = text_of(SOURCE, TYPES)
    assert text.endswith(
        f'extern "C" __global__ void {name}(const __nv_bfloat16* x, const uint32_t* y, float* out, '
        "int x_shape_1, int y_shape_0) {\n"
        "kernels::sum(x, y_shape_0, x_shape_1, x_shape_1 / 2, out);\n}\n"
    )


def test_a_kernel_is_compiled_for_the_blocks_that_it_is_launched_in() -> None:
    name, text = text_of(replace(SOURCE, bounds=(384, 2)), TYPES)
    assert f"__global__ void __launch_bounds__(384, 2) {name}(" in text


def test_a_kernel_has_another_name_where_its_text_differs() -> None:
    others = [
        replace(SOURCE, files=()),
        replace(SOURCE, function="addition"),
        replace(SOURCE, bounds=(128, 1)),
    ]
    names = {text_of(source, TYPES)[0] for source in (SOURCE, *others)}
    names.add(text_of(SOURCE, ((mx.float16, mx.uint32), (mx.float32,)))[0])
    assert len(names) == 5
