"""Scenes of one shape or digit in front of a background, their captions, and PNG files.  Numpy alone.

K pixels along an edge; pictures are [K, K, 3] float32 from 0 to 1.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.floating[Any]]

EDGE = 32
FRAMES = 4
COLOURS = {
    "red": (0.88, 0.16, 0.16), "green": (0.13, 0.66, 0.25), "blue": (0.18, 0.32, 0.92), "yellow": (0.98, 0.83, 0.12),
    "pink": (0.97, 0.42, 0.72), "brown": (0.50, 0.29, 0.13),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "ring", "cross")
SEGMENTS = {
    "0": "abcdef", "1": "bc", "2": "abged", "3": "abgcd", "4": "fgbc", "5": "afgcd", "6": "afgedc", "7": "abc",
    "8": "abcdefg", "9": "abcdfg",
}  # fmt: skip
"""Strokes of a digit, named as those of a seven-segment display."""
STROKES = {
    "a": (-1, -2, 1, -2), "b": (1, -2, 1, 0), "c": (1, 0, 1, 2), "d": (-1, 2, 1, 2), "e": (-1, 0, -1, 2),
    "f": (-1, -2, -1, 0), "g": (-1, 0, 1, 0),
}  # fmt: skip
"""Ends (x, y, x, y) of each, in half widths of the digit."""
THINGS = (*SHAPES, *SEGMENTS)
BACKGROUNDS = ("black", "white", "sky", "sand")
"""Two plain ones, one that changes slowly, and one of random grains."""
PLACES = (10.0, 14.0, 18.0, 22.0)
RADII = (7.5, 10.0)
MOVES = {"left": (-4.0, 0.0), "right": (4.0, 0.0), "up": (0.0, -4.0), "down": (0.0, 4.0)}
"""Pixels per frame of a clip."""


@dataclass(frozen=True)
class Scene:
    thing: str
    colour: str
    background: str
    x: float
    y: float
    radius: float
    move: str = ""
    """Of a clip, else empty."""

    @classmethod
    def random(cls, noise: np.random.Generator, is_clip: bool = False) -> Scene:
        """One that stays inside the picture, in all frames of a clip.  Places lie on a grid of four pixels, as codes
        do, so that a thing has the same codes at each of them."""
        move = str(noise.choice(list(MOVES))) if is_clip else ""
        radius = 7.5 if is_clip else float(noise.choice(RADII))
        way = (FRAMES - 1) * np.array(MOVES.get(move, (0.0, 0.0)))
        edge = 1.12 * radius + 1  # digits are taller than their radius
        starts = [[at for at in PLACES if edge <= min(at, at + by) and max(at, at + by) <= EDGE - edge] for by in way]
        x, y = (float(noise.choice(places)) for places in starts)
        thing, colour, background = (str(noise.choice(names)) for names in (THINGS, list(COLOURS), BACKGROUNDS))
        return cls(thing, colour, background, x, y, radius, move)

    @property
    def caption(self) -> str:
        moving = f" moving {self.move}" if self.move else ""
        return f"a {self.colour} {self.thing}{moving} on {self.background}"

    def frames(self, noise: np.random.Generator) -> list[Pixels]:
        """The pictures of a clip, or one picture."""
        across, down = MOVES.get(self.move, (0.0, 0.0))
        back = _background(self.background, noise)
        count = FRAMES if self.move else 1
        return [replace(self, x=self.x + n * across, y=self.y + n * down)._on(back) for n in range(count)]

    def _on(self, background: Pixels) -> Pixels:
        y, x = np.mgrid[:EDGE, :EDGE].astype(np.float32) + 0.5
        outside = _distance(self.thing, (x - self.x) / self.radius, (y - self.y) / self.radius) * self.radius
        share = np.clip(0.5 - outside, 0, 1)[..., None]
        return (share * np.array(COLOURS[self.colour]) + (1 - share) * background).astype(np.float32)


def words_of(caption: str) -> tuple[str, str, str, str]:
    """Thing, colour, background and move ("" of a picture) of a caption.  Raises ValueError for any other text."""
    words = caption.split()
    rest = words[3:5] if words[3:4] == ["moving"] else []
    if len(words) != 5 + len(rest) or words[0] != "a" or words[-2] != "on":
        raise ValueError(f"expected a caption such as 'a red circle on sand', got {caption!r}")
    thing, colour, background, move = words[2], words[1], words[-1], rest[-1] if rest else ""
    allowed = zip((thing, colour, background), (THINGS, COLOURS, BACKGROUNDS), strict=True)
    if not all(word in names for word, names in allowed) or (rest and move not in MOVES):
        raise ValueError(f"the caption {caption!r} names a thing, colour, background or move that is not drawn")
    return thing, colour, background, move


def _background(name: str, noise: np.random.Generator) -> Pixels:
    plain = np.ones((EDGE, EDGE, 3), np.float32)
    if name == "sky":
        height = np.linspace(0, 1, EDGE, dtype=np.float32)[:, None, None]
        return plain * ((1 - height) * np.array([0.35, 0.62, 0.93]) + height * np.array([0.86, 0.93, 0.99]))
    if name == "sand":
        grains = noise.normal(0, 0.13, (EDGE // 2, EDGE // 2)).repeat(2, 0).repeat(2, 1)
        return np.clip(plain * np.array([0.80, 0.70, 0.50]) + grains[..., None], 0, 1)
    return plain * (0.05 if name == "black" else 0.97)


def _distance(thing: str, x: Pixels, y: Pixels) -> Pixels:
    """Signed distance of each point from the edge of a thing of radius 1, negative inside."""
    if thing in SEGMENTS:
        return np.minimum.reduce([_from_stroke(*STROKES[stroke], x, y) for stroke in SEGMENTS[thing]])
    if thing == "circle":
        return np.hypot(x, y) - 1
    if thing == "ring":
        return np.abs(np.hypot(x, y) - 0.72) - 0.26
    if thing == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85
    if thing == "triangle":
        return np.maximum(0.87 * np.abs(x) - 0.5 * y - 0.5, y - 0.75)
    bar, other = np.minimum(np.abs(x), np.abs(y)), np.maximum(np.abs(x), np.abs(y))
    return np.maximum(bar - 0.3, other - 0.95)


def _from_stroke(left: float, top: float, right: float, bottom: float, x: Pixels, y: Pixels) -> Pixels:
    half, thick = 0.47, 0.17
    ax, ay, bx, by = (half * end for end in (left, top, right, bottom))
    along = np.clip(((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2), 0, 1)
    return np.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay)) - thick


def centre(picture: Pixels) -> tuple[float, float]:
    """x and y of the mean of what differs from the background, which is the mean of the picture's border."""
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    apart = np.maximum(np.abs(picture - np.median(border, 0)).max(-1) - 0.4, 0) + 1e-6
    y, x = np.mgrid[:EDGE, :EDGE]
    return float((apart * x).sum() / apart.sum()), float((apart * y).sum() / apart.sum())


def sheet(rows: list[list[Pixels]], scale: int = 2, gap: int = 3) -> Pixels:
    """Pictures beside and below each other, each pixel `scale` wide; shorter rows are filled with white."""
    step, wide = EDGE * scale + gap, max(map(len, rows))
    whole = np.ones((len(rows) * step + gap, wide * step + gap, 3), np.float32)
    for down, row in enumerate(rows):
        for across, picture in enumerate(row):
            top, left = gap + down * step, gap + across * step
            whole[top : top + EDGE * scale, left : left + EDGE * scale] = picture.repeat(scale, 0).repeat(scale, 1)
    return whole


def write_png(path: Path, picture: Pixels) -> None:
    """An image [height, width, 3] from 0 to 1, as a PNG file of 8 bits a channel."""
    octets = (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in octets)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", octets.shape[1], octets.shape[0], 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    )
