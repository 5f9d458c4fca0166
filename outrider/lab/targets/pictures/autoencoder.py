"""Pictures as codes of a codebook, and back.  (VQ-VAE, arXiv 1711.00937.)

Four by four pixels become one code: convolutions, the nearest entry of the codebook, convolutions back.  Gradients pass
the choice of the entry unchanged; entries that no picture used are put where the encoder's outputs are.

R pictures, K pixels along an edge, G = K / 4 codes along an edge, C codes, E numbers of an entry.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import TargetError

WEIGHTS, SIZES = "autoencoder.safetensors", "autoencoder.json"
"""Its files, beside the target's."""


class Autoencoder(nn.Module):
    def __init__(self, codes: int = 128, width: int = 32, entry: int = 12):
        super().__init__()
        self.sizes = {"codes": codes, "width": width, "entry": entry}
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.GELU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GELU(),
            nn.Conv2d(2 * width, entry, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(entry, 2 * width, 3, 1, 1), nn.GELU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GELU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip
        self.codebook = nn.Parameter(torch.randn(codes, entry) * 0.1)

    def nearest(self, states: Tensor) -> Tensor:
        """Number of the nearest entry to states [..., E]."""
        codes: Tensor = torch.cdist(states.flatten(0, -2), self.codebook).argmin(-1)
        return codes.view(states.shape[:-1])

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Codes [R, G * G] of pictures [R, K, K, 3], line by line."""
        return self.nearest(self.states(pictures)).flatten(1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Pictures [R, K, K, 3] of codes [R, G * G]."""
        edge = round(codes.shape[1] ** 0.5)
        entries = self.codebook[codes.view(len(codes), edge, edge)]
        return self._pixels(entries).clamp(0, 1)

    def loss(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and which codes it used, [C] bool."""
        states = self.states(pictures)
        codes = self.nearest(states)
        entries = self.codebook[codes]
        pixels = self._pixels(states + (entries - states).detach())
        stays_near = F.mse_loss(entries, states.detach()) + 0.25 * F.mse_loss(states, entries.detach())
        used = torch.bincount(codes.flatten(), minlength=len(self.codebook)) > 0
        return F.mse_loss(pixels, pictures) + 0.1 * stays_near, used

    def smooth_loss(self, pictures: Tensor) -> Tensor:
        """The loss of a batch without a codebook, to begin with."""
        return F.mse_loss(self._pixels(self.states(pictures)), pictures)

    @torch.no_grad()
    def fit_codebook(self, states: Tensor, rounds: int = 12) -> None:
        """Put the entries where states [n, E] of the encoder are, by k-means."""
        self.codebook.copy_(states[torch.randperm(len(states))[: len(self.codebook)]])
        for _ in range(rounds):
            codes = self.nearest(states)
            sums = torch.zeros_like(self.codebook).index_add_(0, codes, states)
            counts = torch.bincount(codes, minlength=len(sums))[:, None]
            self.codebook.copy_(torch.where(counts > 0, sums / counts.clamp(min=1), self.codebook))

    @torch.no_grad()
    def revive(self, pictures: Tensor, used: Tensor) -> None:
        """Put the entries that were not used where the encoder's outputs for some pictures are."""
        states = self.states(pictures).flatten(0, -2)
        unused = (~used).nonzero()[:, 0]
        self.codebook[unused] = states[torch.randint(len(states), (len(unused),))]

    def states(self, pictures: Tensor) -> Tensor:
        """The encoder's outputs [R, G, G, E]."""
        return self.encoder(pictures.movedim(-1, 1)).movedim(1, -1)

    def _pixels(self, entries: Tensor) -> Tensor:
        return self.decoder(entries.movedim(-1, 1)).movedim(1, -1)

    def save(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / WEIGHTS)
        (folder / SIZES).write_text(json.dumps(self.sizes) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Autoencoder:
        """The one of a target's folder.  Raises TargetError if the folder has none."""
        if not (folder / SIZES).is_file():
            raise TargetError(
                f"{folder} has no {SIZES}, so it is no target of pictures; make one with benchmarks/pictures_target.py"
            )
        model = cls(**json.loads((folder / SIZES).read_text()))
        model.load_state_dict(load_file(folder / WEIGHTS))
        return model.eval()
