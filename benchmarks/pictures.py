"""Methods whose papers are about pictures, on the target of words and pictures: `python benchmarks/pictures.py`.

Needs `python benchmarks/pictures_target.py` and the drafters of recipes/pictures:

    outrider run recipes/pictures/jacobi_denoising.yaml
    outrider run recipes/pictures/eagle3.yaml
    outrider run recipes/pictures/eagle3.yaml name=pictures-metaquery drafter.aggregate=metaquery

Counts only: tokens per step (target passes), by the tokens that are letters and those that are codes; the distance of a
lossy rule from the target; and the share of pictures in which a network that took part in nothing else names what the
caption says.  Intervals are 95 % over prompts, by bootstrap.  Writes results/pictures.json, and two sheets of pictures
beside the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.batch_time import write  # noqa: E402
from outrider.decoding.protocols import Drafter  # noqa: E402
from outrider.decoding.state import Request  # noqa: E402
from outrider.generation import serve  # noqa: E402
from outrider.lab.judges.scorer import scorer  # noqa: E402
from outrider.lab.targets.pictures import recogniser, vocabulary  # noqa: E402
from outrider.lab.targets.pictures.autoencoder import Autoencoder  # noqa: E402
from outrider.lab.targets.pictures.drawing import MOVES, Pixels, centre, sheet, words_of, write_png  # noqa: E402
from outrider.lab.targets.pictures.recogniser import FrameScore, Recogniser  # noqa: E402
from outrider.loading import load_drafter  # noqa: E402
from outrider.policies import named  # noqa: E402
from outrider.policies.lossy import LossyJudge  # noqa: E402
from outrider.sampling.judge import SamplingJudge  # noqa: E402
from outrider.sampling.settings import Sampling  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402

RUNS, PAGES = ROOT / "runs", ROOT / "benchmarks" / "pages"
FOLDER = RUNS / "pictures" / "target"
MOST = {"picture": 66, "mixed": 100, "clip": 262}
"""New tokens of a text of each kind."""
TAUS = (-np.inf, -12.0, -3.0)
SHOWN = ("plain", "SJD, window 16", "SJD2", "SJD, window 16, relaxed(k=2)", "SJD, window 16, relaxed(k=4)",
         "target alone", "scorer, tau -3", "scorer, tau -12", "scorer, tau -inf", "small model alone")  # fmt: skip
"""Rows of the two sheets."""
COLUMNS = 10, 3
"""Pictures and clips in a row."""


@dataclass
class Texts:
    """What one method wrote for some prompts."""

    prompts: list[str]
    written: list[list[int]]
    steps: list[list[int]]
    """Tokens of each step, by prompt."""
    judge: SamplingJudge

    def per_step(self, counts: Callable[[int], bool] = lambda _: True) -> dict[str, float]:
        """Tokens per step over the tokens that count, with its interval; a step counts by the share that it wrote of
        them."""
        tokens, steps = [], []
        for text, sizes in zip(self.written, self.steps, strict=True):
            shares = [1 / size for size in sizes for _ in range(size)]
            kept = [share for token, share in zip(text, shares, strict=True) if counts(token)]
            tokens.append(len(kept))
            steps.append(sum(kept))
        return interval(np.array(tokens, float), np.array(steps, float))

    @property
    def distance(self) -> float:
        return self.judge.distance if isinstance(self.judge, LossyJudge) else 0.0


def interval(tops: np.ndarray, bottoms: np.ndarray) -> dict[str, float]:
    """Ratio of sums, and its 95 % interval over prompts."""
    draws = np.random.default_rng(0).integers(len(tops), size=(2000, len(tops)))
    low, high = np.quantile(tops[draws].sum(1) / np.maximum(bottoms[draws].sum(1), 1e-9), [0.025, 0.975])
    ratio = tops.sum() / max(bottoms.sum(), 1e-9)
    return {"value": round(float(ratio), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def write_texts(
    target: Any, kind: str, count: int, drafter: Drafter | None = None, temperature: float = 1.0,
    judge: SamplingJudge | None = None,
) -> Texts:  # fmt: skip
    """Text i has the seed i whatever drafts, as noise of its own: methods' texts differ, and so do their pictures."""
    judge = judge or SamplingJudge()
    lines = (RUNS / "pictures" / f"prompts-{kind}.jsonl").read_text().splitlines()[:count]
    prompts = [json.loads(line)["messages"][0]["content"] for line in lines]
    requests = [
        Request(target.encode(prompt), MOST[kind], Sampling(temperature, seed=i)) for i, prompt in enumerate(prompts)
    ]
    texts = Texts(prompts, [[] for _ in prompts], [[] for _ in prompts], judge)
    for step in serve(target, requests, drafter, policy="fixed", judge=judge, slots=24, shared_noise=False):
        texts.written[step.request] += step.tokens
        texts.steps[step.request].append(len(step.tokens))
    return texts


class Examiner:
    """Looks at what was written: the pictures, and whether they are what the captions say."""

    def __init__(self, target: Any):
        self.decode, self.autoencoder = target.detokenizer.decode, Autoencoder.load(FOLDER)
        self.model = Recogniser.load(RUNS / "pictures" / "examiner.safetensors")

    def pictures(self, tokens: Sequence[int]) -> list[Pixels]:
        codes = vocabulary.codes_of(self.decode(tokens))
        return list(self.autoencoder.decode(torch.tensor(codes)).numpy()) if codes else []

    def first_pictures(self, texts: Texts, count: int, frames: int = 1) -> list[Pixels]:
        """Those of the first texts, grey where one was not written to its end."""
        grey = np.full((32, 32, 3), 0.5, np.float32)
        rows = [self.pictures(tokens)[:frames] for tokens in texts.written[:count]]
        return [picture for row in rows for picture in [*row, *[grey] * (frames - len(row))]]

    def shares(self, texts: Texts, frames: int = 1) -> dict[str, dict[str, float]]:
        """Shares of pictures that show their caption's thing, colour and background, and its thing alone; a picture
        that was not written shows nothing.  And of clips, the share whose thing moves as it should."""
        shown, moves = [], []
        for prompt, tokens in zip(texts.prompts, texts.written, strict=True):
            caption, pictures = caption_of(prompt), self.pictures(tokens)[:frames]
            shown.append(np.concatenate([self.shows(pictures, caption), np.zeros((frames - len(pictures), 3))]))
            way = words_of(caption)[3]
            moves.append(len(pictures) == frames and bool(way) and moves_by(pictures, MOVES[way]))
        whole, ones = np.stack(shown), np.ones(len(shown))
        result = {"recognised": whole.all(-1).mean(1), "thing": whole[:, :, 0].mean(1)}
        if frames > 1:
            result["moving"] = np.array(moves, float)
        return {name: interval(values, ones) for name, values in result.items()}

    @torch.no_grad()
    def shows(self, pictures: list[Pixels], caption: str) -> np.ndarray:
        """Which of thing, colour and background each picture shows, [pictures, 3]."""
        if not pictures:
            return np.zeros((0, 3))
        logs = self.model(torch.from_numpy(np.stack(pictures)))
        labels = recogniser.labels_of([caption] * len(pictures))
        return torch.stack([log.argmax(-1) == label for log, label in zip(logs, labels, strict=True)], 1).numpy()


def caption_of(prompt: str) -> str:
    return prompt.rstrip(":").split("=")[-1]


def moves_by(pictures: list[Pixels], way: tuple[float, float]) -> bool:
    """Whether the thing moves at least half as far as it should from the first to the last frame, and sideways less."""
    (left, top), (right, bottom) = centre(pictures[0]), centre(pictures[-1])
    moved, most = np.array([right - left, bottom - top]), 4.0 * (len(pictures) - 1)
    along = float(moved @ np.array(way)) / 4.0
    return along > most / 2 and float(np.linalg.norm(moved)) < 1.4 * along


# ── the parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def jacobi_rows(target: Any, examiner: Examiner, count: int) -> Iterator[tuple[dict[str, Any], list[Pixels]]]:
    """SJD and SJD2 on pictures drawn from captions, with drafters of other kinds and lossy rules beside them."""
    denoised = load_target(RUNS / "pictures-sjd2" / "target", compile=False)
    drafters: dict[str, tuple[Any, Drafter | None, str]] = {"plain": (target, None, "standard")}
    for window in (8, 16):
        drafters[f"SJD, window {window}"] = target, jacobi(target, window, "repeat"), "standard"
    drafters["SJD, window 16, n-grams"] = target, jacobi(target, 16, "ngram"), "standard"
    drafters["SJD2's target, plain"] = denoised, None, "standard"
    drafters["SJD2"] = denoised, load_drafter("jacobi_denoising", denoised, window=12), "standard"
    drafters["small model"] = target, small_model(target, 6), "standard"
    drafters["EAGLE-3"] = target, load_drafter(RUNS / "pictures-eagle3" / "checkpoint", target), "standard"
    for rule in ("relaxed(k=2)", "relaxed(k=4)", "typical(epsilon=0.09, delta=0.3)"):
        drafters[f"SJD, window 16, {rule}"] = target, jacobi(target, 16, "repeat"), rule
    for name, (model, drafter, rule) in drafters.items():
        for temperature in (1.0, 0.0):
            judge = named.judge(rule, allow_lossy=rule != "standard")
            if isinstance(judge, LossyJudge) and not temperature:
                continue
            texts = write_texts(model, "picture", count, drafter, temperature, judge)
            row = {
                "method": name, "temperature": temperature, "lossless": rule == "standard", "prompts": count,
                "tokens_per_step": texts.per_step(), "of_codes": texts.per_step(vocabulary.is_code),
                "distance": round(texts.distance, 4), **examiner.shares(texts),
            }  # fmt: skip
            if temperature:
                row["by_background"] = by_background(texts)
            if model is denoised and drafter is None:
                row["distance_of_target"] = round(distance_of(target, denoised, texts), 4)
            print(row, flush=True)
            is_shown = temperature and name in SHOWN
            yield row, examiner.first_pictures(texts, COLUMNS[0]) if is_shown else []


def jacobi(target: Any, window: int, init: str) -> Drafter:
    return load_drafter("jacobi", target, window=window, init=init)


def small_model(target: Any, length: int) -> Drafter:
    return load_drafter("small_model", target, model=str(RUNS / "pictures" / "small"), length=length)


def by_background(texts: Texts) -> dict[str, float]:
    """Tokens per step on each background."""
    names = [words_of(caption_of(prompt))[2] for prompt in texts.prompts]
    return {
        name: round(sum(map(sum, steps)) / sum(map(len, steps)), 2)
        for name in sorted(set(names))
        for steps in [[each for each, other in zip(texts.steps, names, strict=True) if other == name]]
    }


@torch.no_grad()
def distance_of(target: Any, other: Any, texts: Texts) -> float:
    """Mean total variation between two targets' next tokens, over the texts that the other wrote."""
    distances = []
    for prompt, tokens in zip(texts.prompts, texts.written, strict=True):
        text, start = torch.tensor([[*target.encode(prompt), *tokens]]), len(target.encode(prompt)) - 1
        p, q = (model.model(text, use_cache=False).logits[0, start:-1].softmax(-1) for model in (target, other))
        distances += ((p - q).abs().sum(-1) / 2).tolist()
    return float(np.mean(distances))


def clip_rows(target: Any, examiner: Examiner, count: int) -> Iterator[tuple[dict[str, Any], list[Pixels]]]:
    """SDVG: the small model writes frames, which the scorer accepts or the target writes anew."""
    drafter, score = small_model(target, 65), FrameScore(FOLDER, target)
    small = load_target(RUNS / "pictures" / "small", compile=False)
    judges: dict[str, tuple[Any, Drafter | None, SamplingJudge]] = {
        "target alone": (target, None, SamplingJudge()), "small model alone": (small, None, SamplingJudge()),
        "small model, exact": (target, small_model(target, 6), SamplingJudge()),
    }  # fmt: skip
    for tau in TAUS:
        judges[f"scorer, tau {tau:g}"] = target, drafter, LossyJudge(scorer(float(tau), "min", "sentence", 1, score))
    for name, (model, drafts, judge) in judges.items():
        texts = write_texts(model, "clip", count, drafts, 1.0, judge)
        figures = judge.figures if isinstance(judge, LossyJudge) else {}
        row = {
            "method": name, "prompts": count, "tokens_per_step": texts.per_step(), "distance": round(texts.distance, 4),
            **{key: round(figures[key], 3) for key in ("drafted_share", "blocks_accepted") if key in figures},
            **examiner.shares(texts, frames=4),
        }  # fmt: skip
        print(row, flush=True)
        yield row, examiner.first_pictures(texts, COLUMNS[1], frames=4) if name in SHOWN else []


def mixed_rows(target: Any, count: int) -> Iterator[dict[str, Any]]:
    """Hyper-Bagel: after a picture its caption and another picture, in one loop; letters and codes apart."""
    drafters: dict[str, Drafter] = {
        "EAGLE-3, fc": load_drafter(RUNS / "pictures-eagle3" / "checkpoint", target),
        "EAGLE-3, metaquery": load_drafter(RUNS / "pictures-metaquery" / "checkpoint", target),
        "SJD, window 16": jacobi(target, 16, "repeat"), "small model": small_model(target, 6),
    }  # fmt: skip
    for temperature in (0.0, 1.0):
        steps = {}
        for name, drafter in drafters.items():
            texts = write_texts(target, "mixed", count, drafter, temperature)
            row = {
                "method": name, "temperature": temperature, "prompts": count, "tokens_per_step": texts.per_step(),
                "of_letters": texts.per_step(lambda token: not vocabulary.is_code(token)),
                "of_codes": texts.per_step(vocabulary.is_code),
            }  # fmt: skip
            steps[name] = np.array([[sum(sizes), len(sizes)] for sizes in texts.steps], float)
            if name == "EAGLE-3, metaquery":
                row["over_fc"] = ratio_of(steps[name], steps["EAGLE-3, fc"])
            print(row, flush=True)
            yield row


def ratio_of(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Tokens per step of one over another's, by prompt [N, 2]: tokens and steps."""
    draws = np.random.default_rng(0).integers(len(one), size=(2000, len(one)))
    first, second = (each[draws].sum(1) for each in (one, other))
    ratios = (first[:, 0] / first[:, 1]) / (second[:, 0] / second[:, 1])
    whole = (one[:, 0].sum() / one[:, 1].sum()) / (other[:, 0].sum() / other[:, 1].sum())
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {"value": round(float(whole), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts of each kind; clips have a quarter")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pictures.json")
    options = parser.parse_args()
    target = load_target(FOLDER, compile=False)
    examiner = Examiner(target)
    mixed = list(mixed_rows(target, options.prompts))
    clips, films = zip(*clip_rows(target, examiner, options.prompts // 4), strict=True)
    pictures, drawn = zip(*jacobi_rows(target, examiner, options.prompts), strict=True)
    for name, rows_of_pictures in (("jacobi", drawn), ("clips", films)):
        whole = sheet([row for row in rows_of_pictures if row])
        # fewer shades, so that the noise of the sand takes less of a file
        write_png(PAGES / f"pictures-{name}.png", (whole * 24).round() / 24)
    write({"jacobi": pictures, "clips": clips, "mixed": mixed}, options.out)


if __name__ == "__main__":
    main()
