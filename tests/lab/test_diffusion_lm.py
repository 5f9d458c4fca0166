"""A published diffusion language model drafts: its layout, its pass, and what is refused."""

import json
import shutil

import pytest
import torch
from contracts.chances import keeps_the_distribution
from contracts.parties import TableTarget
from drafters.proposals import exact
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from outrider.decoding.state import Request
from outrider.errors import ConfigError, DrafterError
from outrider.generation import batch
from outrider.lab.diffusion_lm import DiffusionLM
from outrider.lab.drafters import deer
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

VOCABULARY, MASK, BLOCK = 8, 9, 6


def counting(spread: float = 50.0) -> TableTarget:
    """Counts 0 1 2 ... 7 0 1; the less spread, the more often it errs."""
    table = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for token in range(VOCABULARY):
        table[:, token, (token + 1) % VOCABULARY] = spread
    return TableTarget(table)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small model in the published layout that has learnt to count, masks behind the text, rows one early."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=10, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(120):
        begins, length = torch.randint(VOCABULARY, (16, 1)), int(torch.randint(2, 20, ()))
        text = (begins + torch.arange(length + BLOCK)) % VOCABULARY
        shown = text.clone()
        shown[:, length:] = MASK
        both_ways = torch.zeros(16, 1, length + BLOCK, length + BLOCK)
        rows = model(input_ids=shown, attention_mask=both_ways, use_cache=False).logits[:, length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(rows.flatten(0, 1), text[:, length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("dream")
    model.save_pretrained(folder)
    write(
        folder,
        model_type="Dream",
        architectures=["DreamModel"],
        auto_map={"AutoModel": "none.Here"},
        mask_token_id=MASK,
    )
    return folder


def write(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def drafter_of(folder, target, block=BLOCK):
    return deer.build(deer.Config(pretrained=str(folder), block=block), target)


def test_what_a_published_model_has_learnt_is_accepted(published):
    """Catches weights under other names, masks at the wrong place, and rows that are read late."""
    target, prompts = counting(), [[3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [7, 0]]
    found = exact(target, prompts, drafter_of(published, target), Fixed(BLOCK), max_new_tokens=49, slots=2)
    assert sum(len(one.tokens) for one in found) > 4 * sum(one.steps for one in found)


def test_its_pass_is_the_whole_models_in_both_directions(published):
    """Catches a causal mask, and a shorter text that sees its padding."""
    model, texts = DiffusionLM(str(published), counting()), [[3, 4, 5, 6, 7, 0, 1], [2, 3], [5]]
    found = model.logits(texts, 4)
    twin = Qwen2ForCausalLM.from_pretrained(published, config=model.model.config).double()
    for own, text in zip(found, texts, strict=True):
        shown = torch.tensor([[*text, *[MASK] * 4]])
        whole = torch.zeros(1, 1, shown.shape[1], shown.shape[1], dtype=torch.float64)
        wanted = twin(input_ids=shown, attention_mask=whole, use_cache=False).logits[0, len(text) - 1 : -1]
        torch.testing.assert_close(own, wanted[:, :VOCABULARY], rtol=1e-6, atol=1e-6)
    causal = twin(input_ids=shown, use_cache=False).logits[0, len(text) - 1 : -1]
    assert (found[-1] - causal[:, :VOCABULARY]).abs().max() > 1e-3


def test_the_distribution_is_kept(published):
    """Catches a q that is not what was drawn from.  False alarm 1e-6."""
    target = counting(2.0)
    assert keeps_the_distribution(target, drafter_of(published, target, 3), slots=1500, prompt=[0, 1, 2])


def test_of_a_long_text_the_end_is_read(published):
    """Catches a position beyond the model's context, and a beginning that is read instead of the end."""
    target = counting()
    drafter, state = drafter_of(published, target), batch(target, 1)
    text = [n % VOCABULARY for n in range(200)]
    state.admit(0, Request(text, 20, Sampling()))
    logits, read = drafter.model.logits, []
    drafter.model.logits = lambda texts, masks: read.append((texts, masks)) or logits(texts, masks)
    assert drafter.propose(None, state, torch.tensor([2])).live == [2]
    assert read == [([text[-58:]], BLOCK)]


def test_what_is_no_such_model_is_refused(published, tmp_path):
    """Catches another model's weights in these layers, a mask that is a token of the text."""
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    for changes, said in (
        ({"model_type": "llama"}, "model_type 'llama'.*Dream, qwen2"),
        ({"model_type": "Dream", "mask_token_id": None}, "mask token None.*set mask_token_id"),
        ({"mask_token_id": 10}, "mask token 10, of 10 tokens"),
        ({"mask_token_id": MASK}, "lacks 1 weights, such as model.layers.1.mlp.down_proj.weight"),
    ):
        write(tmp_path, **changes)
        if changes == {"mask_token_id": MASK}:
            weights = load_file(tmp_path / "model.safetensors")
            del weights["model.layers.1.mlp.down_proj.weight"]
            save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(DrafterError, match=said):
            DiffusionLM(str(tmp_path), counting())
    with pytest.raises(DrafterError, match="can't read the config of"):
        DiffusionLM(str(tmp_path / "none"), counting())


def test_sizes_that_do_not_fit_are_refused(published, caplog):
    """Catches tokens that the model does not know, no room for a text, training of what is not trained."""
    with pytest.raises(DrafterError, match="vocabulary of 10, and the target 'table' one of 12"):
        DiffusionLM(str(published), TableTarget.random(12))
    with pytest.raises(ConfigError, match="context of 64; lower it"):
        drafter_of(published, counting(), 64)
    with pytest.raises(ConfigError, match="can't be trained"):
        deer.Model(deer.Config(pretrained=str(published)), counting())
    deer.build(deer.Config(pretrained=str(published), layers=2), counting())
    assert "deer.layers has no effect on a pretrained model" in caplog.text
