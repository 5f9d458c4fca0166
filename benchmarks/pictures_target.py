"""A small target of words and pictures, trained from scratch: `python benchmarks/pictures_target.py`.

Writes runs/pictures/target, which loads like any other target (`outrider decode "a red circle on sand:" --target
runs/pictures/target`), with the autoencoder of its pictures and the network that scores frames beside it;
runs/pictures/small, a smaller model of the same texts, to draft; runs/pictures/examiner.safetensors, a second network
that names what is in a picture, for measurements; prompts-*.jsonl, held-out prompts, and conversations.jsonl, others to
train drafters on.  All scenes are drawn here.  A stage whose file exists is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from outrider.lab.targets.pictures import recogniser, vocabulary  # noqa: E402
from outrider.lab.targets.pictures.autoencoder import Autoencoder  # noqa: E402
from outrider.lab.targets.pictures.drawing import Scene, sheet, write_png  # noqa: E402
from outrider.lab.targets.pictures.recogniser import Recogniser  # noqa: E402
from outrider.training.optimizers import Optimizers  # noqa: E402

KINDS = ("picture", "mixed", "clip")
TEXTS = {"picture": 26, "mixed": 15, "clip": 8}
"""Texts of a step, of about as many tokens in each kind."""
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip
SEEN = 8192
"""Pictures that a recogniser is trained on."""
HELD_OUT = 1 << 40
"""Seeds of scenes from here on are not trained on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--codes", type=int, default=128, help="size of the codebook")
    parser.add_argument("--steps", type=int, default=1800, help="of the target; the small model takes half as many")
    options = parser.parse_args()
    target, small = options.out / "target", options.out / "small"
    target.mkdir(parents=True, exist_ok=True)

    def autoencoder() -> None:
        model = Autoencoder(options.codes)
        train_autoencoder(model, 800)
        model.save(target)

    def network(path: Path, seed: int) -> None:
        model = Recogniser()
        train_recogniser(model, Autoencoder.load(target), 900, seed)
        save_file(model.state_dict(), path)

    def language_model(folder: Path, steps: int, **sizes: int) -> None:
        model = LlamaForCausalLM(vocabulary.config(options.codes, **sizes))
        train(model, Autoencoder.load(target), steps, options.out / f"{folder.name}.jsonl")
        model.generation_config = GenerationConfig(eos_token_id=0)
        model.save_pretrained(folder)
        vocabulary.tokenizer(options.codes).save_pretrained(folder)

    stage(target / "autoencoder.json", autoencoder)
    stage(target / recogniser.WEIGHTS, lambda: network(target / recogniser.WEIGHTS, 1))
    stage(options.out / "examiner.safetensors", lambda: network(options.out / "examiner.safetensors", 2))
    stage(target / "model.safetensors", lambda: language_model(target, options.steps))
    stage(small / "model.safetensors", lambda: language_model(small, options.steps // 2, **SMALL))
    write_prompts(options.out, Autoencoder.load(target))
    write_png(options.out / "autoencoder.png", before_and_after(Autoencoder.load(target)))
    print(f"{target}, {small} and {options.out / 'autoencoder.png'} are written")


def stage(result: Path, make: Callable[[], None]) -> None:
    if result.exists():
        print(f"{result} exists")
        return
    torch.manual_seed(0)
    wall, processor = time.time(), time.process_time()
    make()
    minutes = (time.time() - wall) / 60, (time.process_time() - processor) / 60
    print(f"{result}: {minutes[0]:.1f} minutes, {minutes[1]:.1f} minutes of processor time", flush=True)


# ── scenes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def scenes(count: int, seed: int, kind: str = "picture") -> tuple[list[Scene], Tensor]:
    """Scenes, and their frames [count * frames, 32, 32, 3]; equal seeds, equal scenes."""
    noise = np.random.default_rng(seed)
    chosen = [Scene.random(noise, kind == "clip") for _ in range(count)]
    frames = [frame for scene in chosen for frame in scene.frames(noise)]
    return chosen, torch.from_numpy(np.stack(frames))


def texts(kind: str, count: int, seed: int, autoencoder: Autoencoder) -> list[str]:
    """Texts of a kind, without their end."""
    chosen, frames = scenes(count, seed, kind)
    pictures = [vocabulary.characters_of(codes) for codes in autoencoder.encode(frames).tolist()]
    if kind == "picture":
        return [f"{scene.caption}:{picture}." for scene, picture in zip(chosen, pictures, strict=True)]
    if kind == "clip":
        clips = np.array(pictures).reshape(count, -1)
        return [f"{scene.caption}:{'.'.join(clip)}." for scene, clip in zip(chosen, clips, strict=True)]
    # a second scene of the same caption
    noise = np.random.default_rng(seed + 1)
    others = [redrawn(scene, noise).frames(noise)[0] for scene in chosen]
    again = autoencoder.encode(torch.from_numpy(np.stack(others))).tolist()
    return [
        f"{picture}={scene.caption}:{vocabulary.characters_of(other)}."
        for scene, picture, other in zip(chosen, pictures, again, strict=True)
    ]


def redrawn(scene: Scene, noise: np.random.Generator) -> Scene:
    """The same caption at another place."""
    other = Scene.random(noise)
    return Scene(scene.thing, scene.colour, scene.background, other.x, other.y, other.radius)


def write_prompts(out: Path, autoencoder: Autoencoder) -> None:
    """Conversations of one turn: what stands before that which is to be predicted.  Held-out ones by kind, and others
    to train drafters on."""
    others = []
    for number, kind in enumerate(KINDS):
        for path, count, seed in (out / f"prompts-{kind}.jsonl", 256, HELD_OUT + number), (None, 256, 10**9 + number):
            ends = "=" if kind == "mixed" else ":"
            prompts = [text.split(ends)[0] + ends for text in texts(kind, count, seed, autoencoder)]
            rows = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
            if path is None:
                others.append(rows)
            else:
                path.write_text("\n".join(rows) + "\n")
    by_turns = [row for rows in zip(*others, strict=True) for row in rows]
    (out / "conversations.jsonl").write_text("\n".join(by_turns) + "\n")


def before_and_after(autoencoder: Autoencoder) -> np.ndarray:
    _, frames = scenes(12, HELD_OUT)
    return sheet([list(frames.numpy()), list(autoencoder.decode(autoencoder.encode(frames)).numpy())])


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def batches(steps: int, seed: int) -> Iterator[tuple[int, float, list[Scene], Tensor]]:
    """Number of a step, its learning rate's share, and 48 pictures with their scenes."""
    for step in range(steps):
        yield step, min(1.0, 20 * (step + 1) / steps) * (1 - step / steps), *scenes(48, seed * 10**6 + step)


def train_autoencoder(model: Autoencoder, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    used = torch.zeros(len(model.codebook), dtype=torch.bool)
    smooth = steps // 2
    for step, rate, _, frames in batches(steps, 1):
        if step < smooth:
            model.smooth_loss(frames).backward()
            descend(optimizer, model, 4e-3 * rate)
            continue
        if step == smooth:
            model.fit_codebook(model.states(torch.cat([scenes(96, n)[1] for n in range(4)])).flatten(0, -2))
        loss, now = model.loss(frames)
        used |= now
        loss.backward()
        descend(optimizer, model, 4e-3 * rate)
        if step % 50 == 49 and step < 0.8 * steps:
            model.revive(frames, used)
            used[:] = False
        if step % 100 == 0 or step == steps - 1:
            print(f"autoencoder {step}: {float(loss.detach()):.5f}, {int(now.sum())} codes in a batch", flush=True)


def train_recogniser(model: Recogniser, autoencoder: Autoencoder, steps: int, seed: int) -> None:
    """On pictures that went through the autoencoder, as those to be scored do."""
    torch.manual_seed(seed)
    drawn = [scenes(256, seed * 10**7 + part) for part in range(SEEN // 256)]
    captions = [scene.caption for chosen, _ in drawn for scene in chosen]
    seen = torch.cat([autoencoder.decode(autoencoder.encode(frames)) for _, frames in drawn])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    for step in range(steps):
        batch = torch.randint(len(seen), (64,))
        loss = -model.scores(seen[batch], [captions[n] for n in batch.tolist()]).mean()
        loss.backward()
        descend(optimizer, model, 3e-3 * min(1.0, 20 * (step + 1) / steps) * (1 - step / steps))
    print(f"recogniser: {recognised(model, autoencoder):.3f} of held-out pictures", flush=True)


@torch.no_grad()
def recognised(model: Recogniser, autoencoder: Autoencoder) -> float:
    """Share of held-out pictures of which thing, colour and background are named."""
    chosen, frames = scenes(256, HELD_OUT)
    labels = recogniser.labels_of([scene.caption for scene in chosen])
    logs = model(autoencoder.decode(autoencoder.encode(frames)))
    right = torch.stack([one.argmax(-1) == label for one, label in zip(logs, labels, strict=True)]).all(0)
    return float(right.double().mean())


def descend(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(model: LlamaForCausalLM, autoencoder: Autoencoder, steps: int, log: Path) -> None:
    """Cross entropy of the next token, one kind of text per step by turns."""
    print(f"{log.stem}: {sum(w.numel() for w in model.parameters()) / 1e6:.2f} M weights, {steps} steps", flush=True)
    optimizer = Optimizers(model, "muon", model.config.vocab_size, 0.1)
    tokenizer, began = vocabulary.tokenizer(model.config.vocab_size - vocabulary.FIRST), time.time()
    for step in range(steps):
        kind = KINDS[step % len(KINDS)]
        loss = next_token(model, rows_of(texts(kind, TEXTS[kind], 2 * step, autoencoder), tokenizer)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(4e-3 * min(1.0, 20 * (step + 1) / steps) * max(0.02, 1 - step / steps))
        optimizer.zero_grad()
        if step == 10:
            print(f"about {(time.time() - began) / 11 * (steps - 11) / 60:.0f} minutes to go", flush=True)
        if step % 100 == 99 or step == steps - 1:
            row = {"step": step + 1, "seconds": round(time.time() - began), **held_out(model, autoencoder, tokenizer)}
            print(row, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")


def rows_of(texts: list[str], tokenizer) -> Tensor:
    """Ids [R, S] of texts with their end, -1 after it."""
    ids = [torch.tensor([*tokenizer.encode(text), 0]) for text in texts]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)


def next_token(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Cross entropy in nats of all tokens but the first, one after the other."""
    logits = model(rows[:, :-1].clamp(min=0), use_cache=False).logits.float()
    labels = rows[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1, reduction="none")[labels >= 0]


@torch.no_grad()
def held_out(model: LlamaForCausalLM, autoencoder: Autoencoder, tokenizer) -> dict[str, float]:
    """Bits per token of held-out texts, by kind."""
    return {
        kind: round(float(next_token(model, rows_of(texts(kind, 16, HELD_OUT + 9, autoencoder), tokenizer)).mean())
                    / math.log(2), 3)
        for kind in KINDS
    }  # fmt: skip


if __name__ == "__main__":
    main()
