"""Rotate the taps of a token into fewer numbers.  (Principal components, Pearson 1901.)

A drafter that mixes its taps by a matrix first reads T x H numbers as one vector, and the taps of a token say much the
same thing several times.  The directions in which these vectors differ most over a sample of texts are stored; a cache
then holds the vector's coordinates along them.  Every tap is divided by its mean size first, so that a deep layer,
whose states are larger, does not count more.

n rows, T taps, H hidden size, R directions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from outrider.errors import DataError
from outrider.storage.atomic import replacing

EXACT = 4096
"""Up to so many numbers a token the directions are computed exactly; of more, by a random projection."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The directions, by which taps become coordinates and are taken back from them."""

    taps_there: tuple[int, ...]
    sizes: Tensor
    """[T], the mean size of each tap."""
    mean: Tensor
    """[T * H], of taps divided by their sizes."""
    basis: Tensor
    """[T * H, R], orthonormal."""
    share: float
    """Of the variance, which the directions hold."""

    def coordinates(self, taps: Tensor) -> Tensor:
        """[n, R] of taps [n, T, H]."""
        return ((taps.float() / self.sizes[:, None]).flatten(1) - self.mean) @ self.basis

    def taps(self, coordinates: Tensor, taps: Sequence[int]) -> Tensor:
        """These taps [n, len(taps), H], as far as the directions hold them, in the coordinates' type."""
        dtype, count = coordinates.dtype, len(self.sizes)
        chosen = [self.taps_there.index(tap) for tap in taps]
        basis = self.basis.unflatten(0, (count, -1))[chosen].flatten(0, 1).to(coordinates.device, dtype)
        mean = self.mean.unflatten(0, (count, -1))[chosen].flatten().to(coordinates.device, dtype)
        found = torch.addmm(mean, coordinates, basis.T).unflatten(1, (len(chosen), -1))
        return found * self.sizes[chosen].to(coordinates.device, dtype)[:, None]

    @property
    def hash(self) -> str:
        """16 hex digits of the directions."""
        parts = (self.sizes, self.mean, self.basis)
        return hashlib.blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=8).hexdigest()

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        parts = {"sizes": self.sizes, "mean": self.mean, "basis": self.basis, "share": torch.tensor(self.share)}
        with replacing(path) as part:
            part.write_bytes(save({**parts, "taps": torch.tensor(self.taps_there)}))


@torch.no_grad()
def fit(taps: Tensor, layers: tuple[int, ...], directions: int) -> Rotation:
    """The directions of taps [n, T, H] of these layers.  Raises DataError for more directions than rows or numbers."""
    most = min(len(taps), taps.shape[1] * taps.shape[2])
    if directions >= most:
        raise DataError(
            f"prepare.rotate must be below {most} (the numbers of a token's taps, and the tokens of the first shard), "
            f"got {directions}; choose fewer, or set prepare.rotate to 0"
        )
    taps = taps.float()
    of_token = taps.square().mean(-1).sqrt()
    sizes = of_token.median(0).values.clamp(min=1e-30)
    # a token a thousand times larger than the rest, as the first one often is, would be a direction of its own
    calm = (of_token / sizes).amax(1) < 10
    rows = (taps[calm] / sizes[:, None]).flatten(1)
    mean = rows.mean(0)
    rows = rows - mean
    if rows.shape[1] <= EXACT:
        values, vectors = torch.linalg.eigh((rows.T @ rows).double())
        basis, held = vectors.flip(1)[:, :directions].float(), float(values.flip(0)[:directions].sum() / values.sum())
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, sizes_of, basis = torch.svd_lowrank(rows, q=directions, niter=2)
        held = float(sizes_of.square().sum() / rows.square().sum())
    return Rotation(layers, sizes, mean.contiguous(), basis.contiguous(), held)


def load(path: Path) -> Rotation:
    """Read a rotation.  Raises OSError, SafetensorError or KeyError."""
    parts = load_file(path)
    taps = tuple(parts["taps"].tolist())
    return Rotation(taps, parts["sizes"], parts["mean"], parts["basis"], float(parts["share"]))
