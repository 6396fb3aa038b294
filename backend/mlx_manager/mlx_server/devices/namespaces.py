"""The Python modules that a model is built from."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from mlx import nn


def namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the namespaces in which the functions of a model's modules look names up.

    They include namespaces of code in the model's own folder, which can't be found otherwise.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    calls = (vars(kind).get("__call__") for kind in kinds)
    spaces = [call.__globals__ for call in calls if isinstance(call, FunctionType)]
    return list({id(space): space for space in spaces}.values())
