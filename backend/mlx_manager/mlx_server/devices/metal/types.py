"""Metal's names of the element types of arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

TYPES: dict[Any, str] = {
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.float32: "float",
}
