"""A target of words and pictures: what its tokens mean, and that what is written of a tiny codebook is the target's."""

import dataclasses
import math
import zlib

import numpy as np
import pytest
import torch
from contracts.chances import difference
from picture_targets import distribution_after, of_three_codes, picture_model, pictures
from safetensors.torch import save_file

from outrider.errors import ConfigError, DataError, TargetError
from outrider.lab.drafters import jacobi, jacobi_denoising
from outrider.lab.judges.relaxed import relaxed
from outrider.lab.judges.scorer import Block
from outrider.lab.targets.pictures import drawing, recogniser, vocabulary
from outrider.lab.targets.pictures.autoencoder import Autoencoder
from outrider.lab.targets.pictures.drawing import Scene, centre, words_of, write_png
from outrider.lab.targets.pictures.recogniser import Recogniser
from outrider.policies import named
from outrider.policies.lossy import LossyJudge
from outrider.sampling.text import Detokenizer
from outrider.targets.load import load_target


def scene(**changes: object) -> Scene:
    return dataclasses.replace(Scene("circle", "red", "black", 10.0, 20.0, 7.0), **changes)


# ── pixels, codes and text ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_scene_is_drawn_where_and_as_it_says():
    """Catches axes that are swapped, a colour of another name, and a clip that moves the other way."""
    noise = np.random.default_rng(0)
    (picture,) = scene().frames(noise)
    assert np.allclose(picture[20, 10], drawing.COLOURS["red"], atol=1e-6)
    assert float(picture[10, 20].max()) < 0.1
    assert centre(picture) == pytest.approx((9.5, 19.5), abs=0.1)
    for move, (across, down) in drawing.MOVES.items():
        frames = scene(move=move, x=16.0, y=16.0, radius=3.0).frames(noise)
        first, last = centre(frames[0]), centre(frames[-1])
        steps = len(frames) - 1
        assert (last[0] - first[0], last[1] - first[1]) == pytest.approx((across * steps, down * steps), abs=0.7)


def test_every_thing_looks_different_and_stays_inside():
    """Catches two digits with the same strokes, and scenes that the edge cuts."""
    noise = np.random.default_rng(1)
    drawn = [scene(thing=thing, x=16.0, y=16.0, radius=9.0).frames(noise)[0] for thing in drawing.THINGS]
    for n, one in enumerate(drawn):
        assert all(np.abs(one - other).mean() > 0.003 for other in drawn[:n])
    for seed in range(60):
        made = Scene.random(np.random.default_rng(seed), is_clip=bool(seed % 2))
        for frame in dataclasses.replace(made, background="black").frames(noise):
            assert max(frame[0].max(), frame[-1].max(), frame[:, 0].max(), frame[:, -1].max()) < 0.3


def test_a_caption_says_what_was_drawn_and_nothing_else_is_a_caption():
    """Catches words in another order, and text that is taken for a caption."""
    made = Scene.random(np.random.default_rng(4), is_clip=True)
    assert words_of(made.caption) == (made.thing, made.colour, made.background, made.move)
    assert words_of("a red 7 on sand") == ("7", "red", "sand", "")
    for text in ("", "a red dog on sand", "a red 7 moving in on sand", "a red 7 on sand today", "red 7 on sand"):
        with pytest.raises(ValueError, match="caption"):
            words_of(text)


def test_text_is_tokens_and_back_and_codes_stand_after_the_letters():
    """Catches a code that is another's character, letters that are lost, and ids that differ from the model's."""
    tokenizer, codes = vocabulary.tokenizer(128), list(range(64, 128))
    text = f"a red 7 on sand:{vocabulary.characters_of(codes)}."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text)
    assert [token - vocabulary.FIRST for token in ids if vocabulary.is_code(token)] == codes
    assert vocabulary.codes_of(text + text) == [codes, codes]
    assert len(tokenizer) == vocabulary.config(128).vocab_size
    assert tokenizer.encode("É") == [1] and tokenizer.eos_token_id == 0
    with pytest.raises(DataError, match="1 to 256"):
        vocabulary.tokenizer(257)


def test_a_code_is_the_nearest_entry_and_paints_its_own_place():
    """Catches a codebook read by column, and codes laid out column by column."""
    torch.manual_seed(0)
    model = Autoencoder(codes=16)
    codebook = model.codebook.detach()
    states = torch.randn(3, 5, codebook.shape[1])
    by_hand = [[min(range(16), key=lambda c: float((s - codebook[c]).norm())) for s in row] for row in states]
    assert model.nearest(states).tolist() == by_hand
    codes = torch.zeros(2, 64, dtype=torch.int64)
    codes[1, 8 * 6 + 1] = 5
    plain, changed = model.decode(codes)
    rows, columns = (plain != changed).any(-1).nonzero().unbind(-1)
    assert int(rows.min()) >= 17 and int(columns.max()) <= 14
    picture = torch.rand(1, 32, 32, 3)
    other = picture.clone()
    other[:, 24:28, 4:8] += 0.5
    assert model.encode(picture).shape == (1, 64)
    moved = (model.states(picture) != model.states(other)).any(-1)[0].nonzero()
    assert {5, 6} & set(moved[:, 0].tolist()) and moved[:, 1].max() <= 3


def test_a_trained_codebook_uses_its_entries_and_is_read_back(tmp_path):
    """Catches entries that are never revived, gradients that do not pass the choice, and a folder of other sizes."""
    torch.manual_seed(0)
    noise, model = np.random.default_rng(0), Autoencoder(codes=16, width=8)
    frames = torch.from_numpy(np.stack([Scene.random(noise).frames(noise)[0] for _ in range(16)]))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(100):
        loss, used = model.loss(frames)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            model.revive(frames, used)
    assert losses[-1] < 0.5 * losses[0]
    assert int(used.sum()) > 6
    model.save(tmp_path)
    again = Autoencoder.load(tmp_path)
    assert torch.equal(again.decode(again.encode(frames)), model.decode(model.encode(frames)))
    with pytest.raises(TargetError, match=r"no autoencoder.json"):
        Autoencoder.load(tmp_path / "elsewhere")


def test_the_encoder_learns_from_the_pixels():
    """Catches a choice of entries that gradients do not pass: where every state is an entry, nothing else moves it."""
    torch.manual_seed(0)
    model, frames = Autoencoder(codes=64), torch.rand(1, 32, 32, 3)
    model.codebook.data = model.states(frames).detach().flatten(0, -2)
    model.loss(frames)[0].backward()
    assert float(model.encoder[0].weight.grad.abs().max()) > 1e-5


def test_a_picture_file_holds_the_pixels(tmp_path):
    """Catches rows without their filter byte, and a header with width and height the wrong way round."""
    picture = np.random.default_rng(0).random((5, 9, 3)).astype(np.float32)
    write_png(tmp_path / "a.png", picture)
    octets = (tmp_path / "a.png").read_bytes()
    assert (int.from_bytes(octets[16:20], "big"), int.from_bytes(octets[20:24], "big")) == (9, 5)
    at = octets.index(b"IDAT")
    lines = zlib.decompress(octets[at + 4 : at + 4 + int.from_bytes(octets[at - 4 : at], "big")])
    pixels = np.frombuffer(lines, np.uint8).reshape(5, 28)[:, 1:].reshape(5, 9, 3)
    assert np.abs(pixels / 255 - picture).max() <= 0.5 / 255 + 1e-6


# ── scores of frames ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path):
    """An autoencoder and a recogniser that were never trained."""
    torch.manual_seed(0)
    Autoencoder(codes=16, width=8).save(tmp_path)
    save_file(Recogniser().state_dict(), tmp_path / recogniser.WEIGHTS)
    return tmp_path


def test_a_block_has_the_scores_of_the_frames_that_it_completes(folder):
    """Catches a frame that is scored twice or never, one that is judged by another caption, and a score of another
    thing than the three that a caption names."""
    target = load_target(picture_model())
    target.tokenizer = vocabulary.tokenizer(16)
    target.detokenizer = Detokenizer(target.tokenizer.decode, is_local=True)
    encode, score = target.tokenizer.encode, recogniser.FrameScore(folder, target)
    caption, noise = "a red 7 moving left on sand", torch.Generator().manual_seed(0)
    codes = torch.randint(16, (3, 64), generator=noise)
    frames = [vocabulary.characters_of(each) + "." for each in codes.tolist()]
    model, autoencoder = Recogniser.load(folder / recogniser.WEIGHTS), Autoencoder.load(folder)
    expected = []
    logs = [log.tolist() for log in model(autoencoder.decode(codes))]
    for thing, colour, background in zip(*logs, strict=True):
        expected.append(thing[drawing.THINGS.index("7")] + colour[0] + background[drawing.BACKGROUNDS.index("sand")])

    def scores(before: str, block: str) -> list[float]:
        return score(Block(encode(block), block, encode(f"{caption}:{before}"), []))

    assert scores("", frames[0]) == pytest.approx(expected[:1])
    assert scores(frames[0], frames[1] + frames[2]) == pytest.approx(expected[1:])
    assert scores(frames[0] + frames[1][:40], frames[1][40:]) == pytest.approx(expected[1:2])
    assert scores(frames[0], frames[1][:63]) == [-math.inf]
    mixed = score(Block(encode(frames[1]), frames[1], encode(f"{frames[0][:-1]}={caption}:"), []))
    assert mixed == pytest.approx(expected[1:2])


# ── exact by enumeration ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def three():
    return of_three_codes()


SJD = {
    "jacobi": (jacobi, jacobi.Config(window=2, init="repeat")),
    "jacobi_denoising": (jacobi_denoising, jacobi_denoising.Config(window=2, levels=1)),
}


@pytest.mark.parametrize("kind", SJD)
def test_pictures_by_jacobi_decoding_are_the_targets_exactly(kind, three, monkeypatch):
    """Catches a q that is not what a guess was drawn from, with no chance of a false alarm: every draw of window, coins
    and residuals is summed, over steps that carry guesses on."""
    module, config = SJD[kind]
    drafter, kept, drafted = module.build(config, three), [], []
    observe = drafter.observe

    def watched(memory, state, draft, accepted, scores):
        kept.append(accepted.counts[0])
        drafted.append(draft.q is not None)
        observe(memory, state, draft, accepted, scores)

    drafter.observe = watched
    written = list(pictures(three, drafter, prompt=[0, 1], patch=monkeypatch))
    assert sum(weight for weight, _ in written) == pytest.approx(1)
    assert difference(written, distribution_after(three, [0, 1])) < 1e-10
    assert sum(kept) > 20 and sum(drafted) > 20


def test_a_lossy_picture_is_refused_unless_allowed_and_its_distance_is_recorded(three, monkeypatch):
    """Catches a lossy rule that anyone gets, and a distance below the true one."""
    with pytest.raises(ConfigError, match="allow_lossy"):
        named.judge("relaxed(k=2)")
    assert isinstance(named.judge("relaxed(k=2)", allow_lossy=True), LossyJudge)
    judges = []

    def lossy():
        judges.append(LossyJudge(relaxed(2)))
        return judges[-1]

    drafter = jacobi.build(SJD["jacobi"][1], three)
    written = list(pictures(three, drafter, lossy, prompt=[0, 1], patch=monkeypatch))
    assert difference(written, distribution_after(three, [0, 1])) > 0.01
    recorded = sum(weight * judge.total for (weight, _), judge in zip(written, judges, strict=True))
    exact = total_variation(written, distribution_after(three, [0, 1]))
    assert 0.02 < exact <= recorded + 1e-12


def total_variation(written, distribution) -> float:
    found = torch.zeros(3, 3, 3, dtype=torch.float64)
    for weight, codes in written:
        found[tuple(codes)] += weight
    first = distribution(())
    joint = torch.stack([
        first[a] * torch.stack([distribution((a,))[b] * distribution((a, b)) for b in range(3)]) for a in range(3)
    ])  # fmt: skip
    return float((found - joint).abs().sum() / 2)
