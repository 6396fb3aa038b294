"""The messages by which rank 0 has the other ranks do as it does.

They hold what the host knows: keys, page numbers, lengths, tokens of prompts. What only the device
knows goes through the group: the rows' newest tokens, and rows of pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.images import MRope

Form = Literal["fused", "joined", "module", "alone"]
"""Form in which a model is run: our decoder over a GPU's kernels, or with joined products on a CPU;
mlx-lm's module over pages, or each row alone."""


@dataclass(frozen=True, slots=True)
class Eyes:
    """Facts of a model that sees; see `execution.images.VisionTraits`."""

    mrope: MRope | None
    levels: int


@dataclass(frozen=True, slots=True)
class Refer:
    """Run the model as it is, for logits to compare with. again: a token at a time."""

    page_size: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Make:
    """Make a way of running the model; the answer says why it can't be made, or None.

    reading, kernels: of a module over pages, whether attention is by a GPU's kernels.
    """

    form: Form
    sight: Eyes | None
    reading: KeyAccess | None = None
    kernels: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the fused decoder with the module. Rank 0 does so at the same time."""


@dataclass(frozen=True, slots=True)
class Warm:
    """Compile the fused decoder's kernels. Rank 0 does so at the same time."""


@dataclass(frozen=True, slots=True)
class More:
    """More pages of a sequence: its table goes on with `pages` after `start` others. A table with
    `start` 0 is a new one."""

    start: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Rows:
    """The running rows of a step; see `forward.Decode`. Their tokens come through the group."""

    keys: list[int]
    lengths: list[int]
    shifts: Sequence[int]
    waited: bool


@dataclass(frozen=True, slots=True)
class ShownRows:
    """Rows of pictures in a chunk, which come through the group.

    places: as in `images.Shown`. shape, dtype: of the rows and of each level.
    """

    places: NDArray[np.int32]
    shape: tuple[int, ...]
    dtype: str
    levels: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a prompt; see `forward.Chunk` and `paged.Span`."""

    key: int
    length: int
    tokens: list[int]
    final: bool
    every: bool
    runs: tuple[tuple[int, int], ...]
    windowed: bool
    shown: ShownRows | None
    angles: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class Run:
    """Run a step. tables: changes of the page tables, by the sequences' keys."""

    rows: Rows | None
    pieces: Sequence[Piece]
    tables: Mapping[int, More] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """Queue the rest of the last step."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop the rest of a step."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop a sequence's state besides its pages, and its table."""

    key: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the number of pages in all layers."""

    pages: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove the content of pages in all layers."""

    pages: list[int]


@dataclass(frozen=True, slots=True)
class Snap:
    """Keep a sequence's state under a number."""

    key: int
    number: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Begin a sequence with the state that is kept under a number."""

    key: int
    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the states that are kept under these numbers."""

    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Serve:
    """The load has ended."""


@dataclass(frozen=True, slots=True)
class KeepPacked:
    """Unpack no weights from now on."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """Change what is compiled; see `compiled.Kinds`. early: None leaves it as it is."""

    early: bool | None = None
    forget: bool = False
    give_up: bool = False


Order = (
    Run
    | Finish
    | Abandon
    | Forget
    | Resize
    | Clear
    | Snap
    | Restore
    | Drop
    | Serve
    | KeepPacked
    | Compiling
    | Refer
    | Make
    | Compare
    | Warm
)
