"""A target whose embeddings depend on the tokens before: hashes, branches, rollback, and its own text."""

import functools
import json
from collections.abc import Sequence

import pytest
import torch
from conftest import Case, first, tiny_model
from torch import Tensor

from benchmarks.families import tiny
from benchmarks.replay import Replay
from outrider.decoding import scheduler as decoding
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.errors import ConfigError, TargetError
from outrider.generation import generate, serve
from outrider.lab.targets.ngram_embedding import (
    NgramEmbeddingConfig,
    NgramHashes,
    grown,
    hashed,
    shifted,
    stopped,
)  # fmt: skip
from outrider.sampling.settings import Sampling
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

ENDS = (9, 3)
"""Where the sum stops; both stand in prompts and in what is written."""
SIZES = {"ngram_order": 4, "ngram_splits": 2, "ngram_table_size": 200, "boundary_token_ids": ENDS}
COUNT = 30


def ngram_model(model, **sizes):
    """A model that is grown, with random tables so large that they decide what is written."""
    found = grown(model, **SIZES | sizes)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight, size in ((found.ngrams.ngram_table.weight, 1.0), (found.ngrams.projection.weight, 0.4)):
            weight.copy_(size * torch.randn(weight.shape, generator=noise))
    return found.eval()


@pytest.fixture(scope="module")
def ngram_target() -> TransformersTarget:
    return load_target(ngram_model(tiny_model()))


@pytest.fixture(scope="module")
def texts(ngram_target, prompts) -> list[list[int]]:
    """What the model itself writes, by passes over whole texts without a cache."""
    return [written(ngram_target.model, prompt) for prompt in prompts]


@functools.cache
def _written(model, prompt: tuple[int, ...]) -> list[int]:
    text = list(prompt)
    for _ in range(COUNT):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


def written(model, prompt: Sequence[int]) -> list[int]:
    return _written(model, tuple(prompt))


def by_hand(text: Sequence[int], hashes: NgramHashes, ends: Sequence[int]) -> list[int]:
    """Rows that the last token of a text looks up, in whole numbers of any size."""
    found = []
    for table in range(hashes.splits * (hashes.order - 1)):
        order, total = 2 + table // hashes.splits, text[-1]
        for back in range(1, order):
            if back >= len(text) or text[-1 - back] in ends:
                break
            total += text[-1 - back] * hashes.vocabulary**back
        found.append(total % (hashes.table_size + 2 * table + 1))
    return found


def mean_by_hand(model, text: Sequence[int]) -> Tensor:
    """The paper's mean for the last token of a text: its word's embedding and P_j T_j[row_j], one after the other."""
    ngrams, hashes = model.ngrams, model.config.hashes
    dim, start = ngrams.ngram_table.embedding_dim, 0
    terms = [model.lm.get_input_embeddings().weight[text[-1]]]
    for table, (row, size) in enumerate(zip(by_hand(text, hashes, ENDS), hashes.sizes, strict=True)):
        own = ngrams.ngram_table.weight[start : start + size]
        terms.append(ngrams.projection.weight[:, table * dim : (table + 1) * dim] @ own[row])
        start += size
    return torch.stack(terms).mean(0)


def test_rows_are_those_of_whole_numbers_of_any_size():
    """Catches a power that overflows, tables in another order, and a sum that goes on over an end or a beginning."""
    for vocabulary, order, splits, rows in ((163_840, 4, 4, 78 * 163_840), (64, 2, 1, 1), (151_936, 8, 2, 2**31)):
        hashes, noise = NgramHashes(vocabulary, order, splits, rows), torch.Generator().manual_seed(1)
        texts = torch.randint(vocabulary, (4, 30), generator=noise)
        ends = (texts[0, 7].item(), texts[1, 20].item(), texts[2, 0].item())
        texts[3, 4:9] = ends[0]
        context = stopped(shifted(texts, order), ends)
        found = hashed(context, torch.tensor(hashes.powers), torch.tensor(hashes.sizes)).tolist()
        for own, text in zip(found, texts.tolist(), strict=True):
            assert own == [by_hand(text[: at + 1], hashes, ends) for at in range(len(text))]


def test_an_n_gram_does_not_reach_into_another_text():
    """Catches texts that are read one after the other in a row and see each other."""
    tokens, documents = torch.arange(10, 18)[None], torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0]])
    found = shifted(tokens, 3, documents)[0].tolist()
    assert found[2:5] == [[12, 11, 10], [13, -1, -1], [14, 13, -1]]


def embeddings_of(target, run) -> Tensor:
    """What the n-gram embedding gives in the one pass that `run` makes."""
    found: list[Tensor] = []
    hook = target.model.ngrams.register_forward_hook(lambda _module, _args, output: found.append(output))
    try:
        run()
    finally:
        hook.remove()
    [one] = found
    return one


def test_generate_writes_what_passes_without_a_cache_write(ngram_target, texts, plain, prompts):
    """Catches a cache of ids that the model's own `generate` does not fill; and n-grams that decide nothing."""
    assert ngram_target.spec.mode == "tree" and ngram_target.selftest.failed is None
    assert [prompt + plain(ngram_target, prompt, COUNT) for prompt in prompts] == texts
    without = ngram_model(tiny_model())
    with torch.no_grad():
        without.ngrams.projection.weight.zero_()
    assert all(written(without, prompt) != text for prompt, text in zip(prompts, texts, strict=True))
    assert any(end in text[len(prompt) :] for end in ENDS for prompt, text in zip(prompts, texts, strict=True))
    # prompts that are padded on the left do not see the padding
    padded, mask = torch.tensor([[5, 17, 11, 4], [7, 7, 30, 2]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    beside = ngram_target.model.generate(padded, attention_mask=mask, **settings).tolist()
    assert beside[0][4:] == written(ngram_target.model, [5, 17, 11, 4])[4:][:12]
    assert beside[1][4:] == written(ngram_target.model, [30, 2])[2:][:12]


def test_growing_changes_nothing_yet(target):
    """Catches an embedding that is not multiplied, or a head that was one matrix with it and is multiplied too."""
    text = torch.arange(30, 50)[None]
    for tied in (False, True):
        model = tiny_model(tie_word_embeddings=tied)
        found = grown(model, **SIZES)
        with torch.no_grad():
            torch.testing.assert_close(found(text).logits, model(text).logits, rtol=1e-9, atol=1e-9)
        assert found.lm is not model and found.get_output_embeddings().weight is not found.get_input_embeddings().weight


@pytest.mark.parametrize("family", first(["mistral-window", "llama4-chunks", "gemma3", "gpt2"]))
def test_other_families_take_it_too(family):
    """Catches masks of windows and chunks that cut the context, and families that scale what they are given."""
    target = load_target(ngram_model(tiny(family, "sdpa")))
    prompts = [list(range(20, 51)), [7, 8, 9, 3]]
    texts = [written(target.model, prompt) for prompt in prompts]
    assert target.spec.mode == "tree"
    drafter = Replay(texts, 128, right=0.7)
    outputs = generate(target, prompts, drafter, max_new_tokens=COUNT, slots=2, policy="fixed")
    assert [prompt + one.tokens for prompt, one in zip(prompts, outputs, strict=True)] == texts
    assert drafter.jumps > 0


def test_rows_without_token_ids_are_refused(workshop, ngram_target):
    """Catches a probe's rows that are embedded as n-grams of whatever stands in their place."""
    with pytest.raises(TargetError, match="n-grams of them; draft without one"):
        generate(ngram_target, [5, 6, 7], workshop.build(Case("tidar"), ngram_target), max_new_tokens=6)


@pytest.mark.parametrize("seed", range(3))
def test_trees_of_every_shape_are_rolled_back(seed, ngram_target, prompts, texts, monkeypatch):
    """Catches ids that are not moved, cut or freed with their keys: wrong branches, true text under wrong siblings,
    budgets that go to 0, prompts in chunks, slots that come and go.  Exact, so there are no false alarms."""
    monkeypatch.setattr(decoding, "PREFILL_CHUNK", 1 + 3 * (seed % 3))
    noise = torch.Generator().manual_seed(seed)
    drafter = Replay(texts, 64, depth=2 + seed % 3, width=1 + seed % 3, right=(0.5, 0.8, 1.0)[seed % 3], seed=seed)
    counts = torch.randint(1, COUNT + 1, (len(prompts),), generator=noise).tolist()
    requests = [Request(prompt, count, Sampling()) for prompt, count in zip(prompts, counts, strict=True)]
    found: list[list[int]] = [[] for _ in requests]
    for progress in serve(ngram_target, requests, drafter, policy="fixed", slots=1 + seed % 4):
        found[progress.request] += progress.tokens
    for prompt, text, own, count in zip(prompts, texts, found, counts, strict=True):
        assert own == text[len(prompt) :][:count]
    assert sum(times for depth, times in drafter.kept.items() if depth) > 10


def test_a_copied_beginning_of_a_text_brings_its_context(ngram_target):
    """Catches keys that a server copies from an earlier prompt without their ids."""
    target, text = ngram_target, list(range(20, 32))
    cache: SlotCache = target.allocate(2, 40)
    target.prefill(cache, [0], torch.tensor([text]), [12])
    assert cache.stores_columns_alone
    cache.copy_in(1, cache.copy_out(0, 0, 7))
    found = embeddings_of(target, lambda: target.verify(cache, [1], torch.tensor([60]), Draft.empty(1)))
    torch.testing.assert_close(found[0, 0], mean_by_hand(target.model, [*text[:7], 60]), rtol=1e-12, atol=1e-12)


def test_a_folder_is_loaded_by_its_config(tmp_path, ngram_target, prompts, texts):
    """Catches constants that are not made again, tables that are not saved, and sizes that the config lacks."""
    ngram_target.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    keys = ("model_type", "ngram_order", "ngram_splits", "ngram_table_size", "ngram_dim", "boundary_token_ids")
    assert [config[key] for key in keys] == ["ngram_embedding", 4, 2, 200, 5, list(ENDS)]
    assert config["text_config"]["model_type"] == "qwen3"
    loaded = load_target(tmp_path, dtype="float64")
    assert loaded.spec.weights_hash == ngram_target.spec.weights_hash
    found = generate(loaded, prompts, "ngram", max_new_tokens=COUNT)
    assert [prompt + one.tokens for prompt, one in zip(prompts, found, strict=True)] == texts


def test_what_it_can_not_do_is_refused(ngram_target):
    """Catches embeddings that are taken for tokens, and n-grams that look beyond a window."""
    with pytest.raises(TargetError, match="reads token ids"):
        ngram_target.model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))
    with pytest.raises(ConfigError, match="beyond a window of 3"):
        NgramEmbeddingConfig({"model_type": "mistral", "sliding_window": 3})
    with pytest.raises(ConfigError, match="order of 2 or more"):
        NgramHashes(64, 1, 2, 100)
