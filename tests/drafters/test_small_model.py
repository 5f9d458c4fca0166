"""A small model that is trained: rows are its own distribution, a checkpoint is whole by itself, serving leaves
training alone."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import batch_of, tiny_model
from safetensors.torch import load_file
from tiny import folder, randomise, talker
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from outrider import checkpoint, drafters, load_drafter
from outrider.config import build
from outrider.errors import ConfigError, DrafterError
from outrider.generation import generate
from outrider.lab.targets.ngram_embedding import grown
from outrider.nn.draft_model import Batch
from outrider.targets.hf import causal_lm
from outrider.targets.quantised import is_quantised
from outrider.training import losses

__all__ = ["folder", "talker"]
MODULE = drafters.find("small_model")
NEW = {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

logging.getLogger("transformers").setLevel(logging.ERROR)

FAMILIES = {
    "qwen3, one matrix at both ends": lambda: tiny_model(num_hidden_layers=1, tie_word_embeddings=True),
    "gemma2, a window and soft caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, **HEADS, **ENDS, sliding_window=5, final_logit_softcapping=0.5, initializer_range=0.2)
    ),
    "bloom, told no positions": lambda: BloomForCausalLM(BloomConfig(**SIZES, n_head=4, **ENDS)),
    "n-grams of the tokens before": lambda: randomise(
        grown(tiny_model(num_hidden_layers=2), ngram_order=3, ngram_splits=2, ngram_table_size=99)
    ),
    "mamba, recurrent": lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=4, **ENDS)),
}


@pytest.fixture
def made(tmp_path, target):
    """Small models to train, each from a folder of its own."""

    def make(lm, **settings) -> MODULE.Model:
        path = tmp_path / f"lm{len(list(tmp_path.iterdir()))}"
        lm.save_pretrained(path)
        return MODULE.Model(MODULE.Config(model=str(path), **settings), target)

    return make


@pytest.fixture(scope="module")
def texts():
    return torch.randint(64, (3, 18), generator=torch.Generator().manual_seed(4))


def logits_of(rows) -> torch.Tensor:
    return torch.cat([draft for draft, _, _ in rows.chunks(7)])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_language_models_own_logits(family, made, target, texts, monkeypatch):
    """Catches a head without the family's scale or cap, rows beside the place they are labelled with."""
    torch.manual_seed(1)
    lm = FAMILIES[family]().float()
    model = made(lm)
    batch = batch_of(target, (), texts)
    batch.loss_mask[0, :4], batch.documents[1, 12:], batch.loss_mask[2] = False, 0, False
    rows = model.predict(batch)
    wanted = lm(input_ids=texts, use_cache=False).logits
    at = [(0, j) for j in range(3, 17)] + [(1, j) for j in range(11)]
    assert rows.labels.tolist() == [int(texts[b, j + 1]) for b, j in at]
    torch.testing.assert_close(logits_of(rows), torch.stack([wanted[b, j] for b, j in at]), rtol=1e-4, atol=1e-4)
    if "soft caps" in family:
        monkeypatch.setattr(model, "_finish", lambda values: values)
        with torch.no_grad():
            assert float((logits_of(rows) - torch.stack([wanted[b, j] for b, j in at])).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_are_read_as_if_each_stood_alone(family, made, target, texts, monkeypatch):
    """Catches a text that sees the one before it, positions that run on, and a family that only seems to take them."""
    torch.manual_seed(1)
    model = made(FAMILIES[family]().float())
    documents = torch.tensor([[1] * 7 + [2] * 11, [3] * 18, [4] * 5 + [5] + [6] * 8 + [0] * 4])
    with torch.no_grad():
        alone = torch.zeros(3, 18, 32)
        for number in range(1, 7):
            where = documents == number
            alone[where] = causal_lm.states(model.lm, texts[where][None])[0]
        real = documents > 0
        prepacked = model.read(texts, documents)
        torch.testing.assert_close(prepacked[real], alone[real], rtol=1e-4, atol=1e-4)
        assert model._reads_prepacked == (family.split(",")[0] not in ("bloom", "mamba"))
        monkeypatch.setattr(model, "_reads_prepacked", not model._reads_prepacked)
        torch.testing.assert_close(
            model.read(texts, documents)[documents == 1], alone[documents == 1], rtol=1e-4, atol=1e-4
        )
        # the other way is as right for a family that takes positions, and leaks for one that does not
        apart = float((model.read(texts, documents)[real] - alone[real]).abs().max())
        assert apart < 1e-4 if not model._reads_prepacked else apart > 1e-3


def test_a_text_longer_than_the_models_context_is_refused(made, target, texts):
    """Catches positions that the model never learnt; texts packed beyond it are fine, as long as each fits."""
    model = made(tiny_model(max_position_embeddings=12))
    with pytest.raises(DrafterError, match=r"18 tokens is longer than the context .* 12; set prepare.length to 12"):
        model.predict(batch_of(target, (), texts))
    halves = replace(batch_of(target, (), texts), documents=torch.tensor([1] * 9 + [2] * 9).expand(3, -1))
    assert len(model.predict(halves).labels) == 3 * 16


def distilled(model, batch: Batch, steps: int) -> None:
    """Forward KL against the target's distribution at every place."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        rows = model.predict(batch)
        for draft, own, part in rows.chunks(10**9):
            losses.kl(draft, own, rows.labels[part]).mean().backward()
        rows.backward()
        optimiser.step()


def test_a_checkpoint_needs_no_folder_and_drafts_as_the_model_did(tmp_path, target, prompts):
    """Catches weights or a shape that are read from the folder again."""
    place = tmp_path / "lm"
    tiny_model(seed=3, num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(place)
    model = MODULE.Model(MODULE.Config(model=str(place), length=3), target)
    distilled(model, batch_of(target, (), torch.arange(48).view(2, 24)), 3)
    checkpoint.save(tmp_path / "c", model)
    model.double()
    shutil.rmtree(place)
    saved = load_file(tmp_path / "c" / checkpoint.WEIGHTS)
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert sum("lm_head" in name or "embed" in name for name in saved) == 1
    loaded = load_drafter(tmp_path / "c", target)
    ends = loaded.model.model.get_input_embeddings().weight, loaded.model.model.get_output_embeddings().weight
    assert ends[0] is ends[1]
    mine, theirs = (generate(target, prompts, drafter, max_new_tokens=12) for drafter in (model.drafter(), loaded))
    assert [g.accepted for g in mine] == [g.accepted for g in theirs]
    served = loaded.model.model.state_dict()
    assert all(torch.equal(weight, served[name]) for name, weight in model.lm.state_dict().items())
    assert torch.equal(*[drafter.model.read(torch.tensor([prompts[2]]))[0] for drafter in (model.drafter(), loaded)])


def test_a_trained_model_is_served_in_the_precision_its_settings_name(talker, tmp_path, target):
    """Catches `quantize` that is saved with the checkpoint and not obeyed where it is loaded."""
    checkpoint.save(tmp_path, MODULE.Model(build(MODULE.Config, {"new": NEW, "quantize": "int8"}), target))
    served = load_drafter(tmp_path, target).model.model
    linear = [
        part for part in served.modules() if type(part) is nn.Linear and part is not served.get_output_embeddings()
    ]
    assert linear and all(is_quantised(part.weight) for part in linear)


def test_a_fresh_model_has_the_sizes_asked_for_and_the_targets_vocabulary(target, tmp_path, prompts):
    """Catches a size that is dropped, and a fresh model that comes back with other weights."""
    model = MODULE.Model(MODULE.Config(new=NEW, length=2), target)
    shape = model.lm.config
    assert (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size, shape.head_dim) == (1, 16, 32, 8)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (2, 1)
    assert (shape.vocab_size, shape.max_position_embeddings, shape.tie_word_embeddings) == (64, 256, True)
    checkpoint.save(tmp_path / "c", model)
    loaded = load_drafter(tmp_path / "c", target)
    tokens = torch.tensor([prompts[2]])
    assert loaded.limit == 2
    wanted = model.double().read(tokens, torch.ones_like(tokens)).detach()
    torch.testing.assert_close(loaded.model.read(tokens)[0], wanted)
    (found,) = generate(target, prompts[0], load_drafter("small_model", target, new=NEW), max_new_tokens=8)
    assert len(found.tokens) == 8


def test_what_cannot_be_trained_is_said(target, talker, folder, tmp_path, caplog):
    """Catches ids that mean other words, sizes that do not fit, and settings without effect."""
    tiny_model(vocab_size=48).save_pretrained(tmp_path / "less")
    with pytest.raises(DrafterError, match=r"a vocabulary of 48, the target .* one of 64; .* can't be trained"):
        MODULE.Model(MODULE.Config(model=str(tmp_path / "less")), target)
    with pytest.raises(DrafterError, match=r"can't load small_model.model '.*gone'.*small_model.new"):
        MODULE.Model(MODULE.Config(model=str(tmp_path / "gone")), target)
    tiny_model(vocab_size=261).save_pretrained(tmp_path / "mute")
    with pytest.raises(DrafterError, match=r"has the tokenizer None, the target .* can't be trained"):
        MODULE.Model(MODULE.Config(model=str(tmp_path / "mute")), talker)
    with pytest.raises(ConfigError, match="set one of them"):
        build(MODULE.Config, {"model": str(folder), "new": NEW})
    for wrong, said in (({"heads": 3, "kv_heads": 2}, "not a multiple"), ({"head_dim": 7}, "even")):
        with pytest.raises(DrafterError, match=said):
            MODULE.Model(MODULE.Config(new=NEW | wrong), target)


def test_a_drafter_leaves_the_model_in_training_and_drafts_with_its_weights(workshop, target, texts):
    """Catches weights frozen by the probe, hooks left on the model."""
    model = MODULE.Model(MODULE.Config(model=workshop._model_folder(target)), target).train()
    drafter = model.drafter()
    assert model.lm.training and all(weight.requires_grad for weight in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)
    assert not any(weight.requires_grad for weight in drafter.model.model.parameters())
    batch = batch_of(target, (), texts)
    before = drafter.model.read(texts)[0]
    distilled(model, batch, 2)
    with torch.no_grad():
        now = model.read(texts, batch.documents)
    assert float((now - before).abs().max()) > 1e-3
    for served in (drafter, model.drafter()):
        torch.testing.assert_close(served.model.read(texts)[0], now, rtol=1e-4, atol=1e-4)


def test_rotary_frequencies_are_not_rounded_with_the_weights(target):
    """Catches a model that is served in bfloat16 and turns far positions by other angles than it was trained with."""
    model = MODULE.Model(MODULE.Config(new=NEW), target)
    before = model.lm.model.rotary_emb.inv_freq.clone()
    rounded = nn.Module.to(tiny_model(num_hidden_layers=2), torch.bfloat16).model.rotary_emb.inv_freq
    assert rounded.dtype == torch.bfloat16  # the fault, as torch does it
    model.to(torch.bfloat16)
    assert torch.equal(model.lm.model.rotary_emb.inv_freq, before)
    assert model.lm.dtype == torch.bfloat16
    served = model.drafter().model.model
    assert torch.equal(served.model.rotary_emb.inv_freq, before)
