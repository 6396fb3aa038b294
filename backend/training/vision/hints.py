"""Heads that tell the tower, early in training, what each patch shows and what is written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.vision.lexicon import COLOURS, SHAPES
from training.vision.samples import CHARACTERS, LONGEST

KINDS = len(SHAPES) + 3  # nothing, the shapes, a number, a word


class Hints(nn.Module):
    """Losses of three linear readings of the patches; thrown away after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = nn.Linear(width, KINDS)
        self.colour = nn.Linear(width, len(COLOURS) + 1)
        self.spelling = nn.Sequential(
            nn.Linear(width, 512), nn.GELU(), nn.Linear(512, LONGEST * (len(CHARACTERS) + 1))
        )

    def forward(self, patches: Tensor, shapes: Tensor, colours: Tensor, texts: Tensor) -> Tensor:
        """Return the sum of the losses.

        patches (b, 256, width); shapes, colours (b, 16, 16); texts (b, 2, 7), as in `Block`.
        """
        shape, colour = shapes.flatten(1).long(), colours.flatten(1).long()
        weight = torch.where(shape > 0, 1.0, 0.25)
        scale = weight.sum()
        kinds = F.cross_entropy(self.shape(patches).float().mT, shape, reduction="none")
        tones = F.cross_entropy(self.colour(patches).float().mT, colour, reduction="none")
        loss: Tensor = ((kinds + tones) * weight).sum() / scale
        for which in range(2):
            covered = (shape == KINDS - 2 + which).float()
            has = (texts[:, which] > 0).any(-1) & (covered.sum(-1) > 0)
            pooled = torch.einsum("bpw,bp->bw", patches.float(), covered)
            pooled = pooled / covered.sum(-1, keepdim=True).clamp(min=1)
            said = self.spelling(pooled).float().view(len(patches), LONGEST, -1)
            wrong = F.cross_entropy(said.mT, texts[:, which].long(), reduction="none").mean(-1)
            loss = loss + (wrong * has).sum() / has.sum().clamp(min=1)
        return loss
