"""Transfer of a step's tokens to the host."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.mapped import TOKENS, Box, Carrier, carrier


@dataclass(frozen=True, slots=True)
class HostTokens:
    """Tokens of a step, on their way to the host.

    sent: the array to evaluate with the step. rows: number of tokens. box: the box that holds the
    tokens once `sent` is evaluated, and its carrier, on an NVIDIA GPU, where reading the tokens'
    own array would move it (see `mapped`). None: `sent` holds the tokens.
    """

    sent: mx.array
    rows: int
    box: tuple[Box, Carrier] | None

    @staticmethod
    def of(tokens: mx.array) -> HostTokens:
        """Prepare the transfer of `tokens`, (rows,) uint32, not evaluated."""
        match carrier():
            case Carrier() as found if tokens.size <= TOKENS:
                told, box = found.tell(tokens)
                return HostTokens(told, tokens.size, (box, found))
        return HostTokens(tokens, tokens.size, None)

    def read(self) -> list[int]:
        """Wait for the step and return its tokens. May be called once only."""
        tokens: list[int]
        if self.box is None:
            tokens = self.sent.tolist()  # type: ignore[assignment]
        else:
            box, by = self.box
            mx.eval(self.sent)
            tokens = box.seen[: self.rows].tolist()
            by.release(box)
        return tokens
