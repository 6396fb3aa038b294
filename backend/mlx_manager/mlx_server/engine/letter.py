"""How the host learns a step's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.mapped import TOKENS, Box, Carrier, carrier


@dataclass(frozen=True, slots=True)
class Letter:
    """Tokens of a step. `sent` is to be evaluated with it; `box`: where they are then, if not
    there, and by whom. On an NVIDIA GPU their array stays where it is: see `mapped`."""

    sent: mx.array
    rows: int
    box: tuple[Box, Carrier] | None

    @staticmethod
    def of(tokens: mx.array) -> Letter:
        """tokens: (rows,) uint32, not evaluated."""
        match carrier():
            case Carrier() as found if tokens.size <= TOKENS:
                told, box = found.tell(tokens)
                return Letter(told, tokens.size, (box, found))
        return Letter(tokens, tokens.size, None)

    def read(self) -> list[int]:
        """Waits for the step. Once only."""
        tokens: list[int]
        if self.box is None:
            tokens = self.sent.tolist()  # type: ignore[assignment]
        else:
            box, by = self.box
            mx.eval(self.sent)
            tokens = box.seen[: self.rows].tolist()
            by.release(box)
        return tokens
