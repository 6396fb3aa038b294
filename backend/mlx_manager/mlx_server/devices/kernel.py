"""Custom kernels of MLX as declarations, from which the text of each is derived."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Reason why no kernel serves a shape on this device."""

    reason: str


@dataclass(frozen=True, slots=True)
class KernelName:
    """A name that the source files declare in `kernels`, such as a type.

    constants: its template arguments.
    """

    name: str
    constants: tuple[Constant, ...] = ()


Constant = mx.Dtype | bool | int | KernelName
"""A template argument. An array's element type has another name in each language."""


@dataclass(frozen=True, slots=True)
class OptionalArgument:
    """Argument for an input or output that not all forms of a kernel have; null without it."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """Argument: a dimension of the input `of`, `times` a number, then divided by `over`."""

    of: str
    axis: int
    times: int = 1
    over: int = 1


@dataclass(frozen=True, slots=True)
class Struct:
    """Argument that is made of others: an aggregate of the source files.

    type: None where the function says it. called: `type` is a function that makes the aggregate,
    and deduces its type.
    """

    type: KernelName | None
    parts: tuple[Argument, ...] = ()
    called: bool = False


Argument = str | OptionalArgument | Size | Struct | int | float | None
"""Argument of a function: an input or output by its name, or a number, floats as float32; None for
null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource(ABC):
    """Declaration of a kernel: one call of a function of its source files.

    name: name for people. files: the source files, and text that is generated, in order. function:
    the function, in `kernels`, or in the class `within`, or, if `made`, in a new object of that
    class. constants: its template arguments. scratch: type of what the threads of a block share, to
    which `scratch` is a pointer.
    """

    name: str
    files: tuple[Path | str, ...]
    function: str
    constants: tuple[Constant, ...] = ()
    arguments: tuple[Argument, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    within: KernelName | None = None
    made: bool = False
    scratch: KernelName | None = None

    types: ClassVar[Mapping[Any, str]]
    """Names of the types of arrays' elements."""
    places: ClassVar[frozenset[str]]
    """Other names that a function may be given: a thread's place, and what threads share."""

    @property
    def header(self) -> str:
        """Text before the kernel."""
        return "".join(file if isinstance(file, str) else source(file) for file in self.files)

    @property
    def body(self) -> str:
        """Text of the kernel between its braces.

        Raises:
            ValueError: an argument is neither an input nor an output.
        """
        arguments = ", ".join(map(self._argument, self.arguments))
        of = "kernels::" if self.within is None else f"{self._constant(self.within)}::"
        if self.made:
            of = f"{of.removesuffix('::')} work;\nwork."
        return f"{self._shared()}{of}{self.function}{self._constants(self.constants)}({arguments});"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The dimensions that the function is given: an input's place and its axis, in order."""
        found = {
            (self.inputs.index(each.of), each.axis)
            for each in _flat(self.arguments)
            if isinstance(each, Size)
        }
        return sorted(found)

    @property
    def unique_name(self) -> str:
        """Name by which MLX keeps the compiled kernel.

        The name must change with the source, so it contains a hash of the source.
        """
        digest = hashlib.sha1(f"{self.header}\0{self.body}".encode(), usedforsecurity=False)
        return f"{self.name}_{digest.hexdigest()[:16]}"

    @abstractmethod
    def size(self, of: str, axis: int) -> str:
        """Return the text for a dimension of an input."""

    @abstractmethod
    def _shared(self) -> str:
        """Return the declaration of `scratch`; "" for none."""

    def _argument(self, argument: Argument) -> str:
        names = {*self.inputs, *self.outputs}
        match argument:
            case None:
                text = "nullptr"
            case OptionalArgument(name):
                text = name if name in names else "nullptr"
            case Size(of, axis, times, over):
                by = f" * {times}" if times > 1 else ""
                text = f"{self.size(of, axis)}{by}" + (f" / {over}" if over > 1 else "")
            case Struct(kind, parts, called):
                made = "" if kind is None else self._constant(kind)
                given = ", ".join(map(self._argument, parts))
                text = f"{made}({given})" if called else f"{made}{{{given}}}"
            case int():
                text = str(argument)
            case float():
                # A number of numpy's has another repr.
                text = f"{float(argument)!r}f"
            case str() if argument in names | self.places:
                text = argument
            case _:
                raise ValueError(f"{self.name}: {argument} is neither an input nor an output")
        return text

    def _constant(self, constant: Constant) -> str:
        match constant:
            case KernelName(name, constants):
                return f"kernels::{name}{self._constants(constants)}"
            case mx.Dtype():
                return self.types[constant]
            case bool():
                return "true" if constant else "false"
        return str(constant)

    def _constants(self, constants: tuple[Constant, ...]) -> str:
        return f"<{', '.join(map(self._constant, constants))}>" if constants else ""


def _flat(arguments: tuple[Argument, ...]) -> Iterator[Argument]:
    for argument in arguments:
        if isinstance(argument, Struct):
            yield from _flat(argument.parts)
        else:
            yield argument


@cache
def source(path: Path) -> str:
    """Return the text of a source file, without comments and indentation.

    The text is kept short because MLX copies a Metal kernel's at every call. It ends with a
    newline, since more text is appended directly.
    """
    lines = map(str.strip, path.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("//"))
