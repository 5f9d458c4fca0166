"""What is in a picture, by a small network; and scores of frames by it, for the lossy judge `scorer`.

SDVG (arXiv 2604.17397) decodes a drafted block of video, scores every frame by ImageReward given the prompt, and takes
the worst.  Here a network that was trained on captioned pictures takes ImageReward's place: a frame's score is the log
probability of the caption's thing, colour and background, in nats, given the frame.

    judge = LossyJudge(scorer(tau=-1.0, aggregate="min", score=FrameScore(folder, target)))

R pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.lab.judges.scorer import Block
from outrider.lab.targets.pictures import vocabulary
from outrider.lab.targets.pictures.autoencoder import Autoencoder
from outrider.lab.targets.pictures.drawing import BACKGROUNDS, COLOURS, THINGS, words_of

WEIGHTS = "recogniser.safetensors"
"""Its file, beside the target's."""
NAMES = (THINGS, tuple(COLOURS), BACKGROUNDS)


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1), nn.GELU(), nn.Conv2d(24, 48, 3, 2, 1), nn.GELU(), nn.Conv2d(48, 96, 3, 1, 1),
            nn.GELU(), nn.Conv2d(96, 96, 3, 2, 1), nn.GELU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Linear(96, len(names)) for names in NAMES)

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Log probabilities [R, names] of thing, colour and background of pictures [R, 32, 32, 3]."""
        states = self.trunk(pictures.movedim(-1, 1))
        return [head(states).log_softmax(-1) for head in self.heads]

    def scores(self, pictures: Tensor, captions: list[str]) -> Tensor:
        """Log probability [R] of each caption."""
        return -torch.stack([
            F.nll_loss(logs, labels, reduction="none")
            for logs, labels in zip(self(pictures), labels_of(captions), strict=True)
        ]).sum(0)  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Recogniser:
        model = cls()
        model.load_state_dict(load_file(path))
        return model.eval()


def labels_of(captions: list[str]) -> list[Tensor]:
    """Numbers [R] of their things, colours and backgrounds."""
    words = [words_of(caption)[:3] for caption in captions]
    return [
        torch.tensor([names.index(word) for word in each])
        for names, each in zip(NAMES, zip(*words, strict=True), strict=True)
    ]


class FrameScore:
    """Scores of the frames that a block holds or completes; a block without any is accepted by none."""

    def __init__(self, folder: Path, target: Any):
        """folder: the target's."""
        self.autoencoder, self.recogniser = Autoencoder.load(folder), Recogniser.load(folder / WEIGHTS)
        self.decode = target.detokenizer.decode

    @torch.no_grad()
    def __call__(self, block: Block) -> list[float]:
        text = self.decode([*block.before, *block.tokens])
        complete = len(vocabulary.codes_of(self.decode(block.before)))
        frames = vocabulary.codes_of(text)[complete:]
        if not frames:
            return [-torch.inf]
        caption = text.split(":")[0].split("=")[-1]
        scores: list[float] = self.recogniser.scores(
            self.autoencoder.decode(torch.tensor(frames)), [caption] * len(frames)
        ).tolist()
        return scores
