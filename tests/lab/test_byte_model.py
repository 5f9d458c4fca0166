"""A model of bytes and patches: what its passes know of a text, and that it is a target like any other."""

import pytest
import torch
from byte_targets import byte_model, ends_of

from outrider.decoding.draft import Draft
from outrider.errors import DrafterError, TargetError
from outrider.fast import NotCompiled
from outrider.generation import generate
from outrider.lab import byte_patches, stale
from outrider.lab.byte_patches import Known
from outrider.lab.drafters import stale_latent
from outrider.lab.targets import byte_model as bytes_and_patches
from outrider.targets.load import load_target

TEXT = (
    b"def read(path):\n        return open(path_of_a_long_name_indeed).read()  # caf\xc3\xa9\n\n\n\n\n\n\n\n\nx = 12345"
)


@pytest.fixture(scope="module")
def own():
    """A tiny target of all bytes."""
    return load_target(byte_model(vocab_size=258))


def known(text: bytes) -> tuple[Known, torch.Tensor, torch.Tensor]:
    """A text's rows, where each attends to those up to itself."""
    ids, positions = torch.tensor([list(text)]), torch.arange(len(text))[None]
    words, causal = byte_patches.of_words(ids), torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
    return Known(causal, positions, words), positions, words


def test_patches_end_as_told_byte_by_byte():
    """Catches a run that is counted from the wrong byte, and kinds that are mixed up."""
    rows, positions, words = known(TEXT)
    for size in (1, 3, 8):
        assert rows.ends(positions, words, size)[0].tolist() == ends_of(list(TEXT), size)


def test_notes_say_positions_and_kinds_exactly():
    """Catches positions that bfloat16 rounds."""
    positions = torch.tensor([[0, 1, 127, 128, 255, 257, 1001, 2047, 32_000, 32_767]])
    words = torch.arange(10)[None] % 3 == 0
    found = Known.of(torch.ones(1, 1, 1, dtype=torch.bool), byte_patches.notes_of(positions, words, torch.bfloat16))
    assert torch.equal(found.positions, positions) and torch.equal(found.words, words)


def test_no_byte_sees_a_later_one(own):
    """Catches a latent that is there before its patch has ended, and patches that a later byte ends."""
    text = torch.tensor([list(TEXT[:60])])
    logits = own.model(text, use_cache=False).logits
    for at in range(2, 60, 5):
        other = text.clone()
        other[:, at:] = (other[:, at:] * 7 + 33) % 256
        torch.testing.assert_close(own.model(other, use_cache=False).logits[:, :at], logits[:, :at], rtol=0, atol=1e-12)
    # the first byte moves what stands beyond both windows
    text, other = torch.tensor([list(TEXT[:80])]), torch.tensor([[ord("a"), *TEXT[1:80]]])
    difference = own.model(other, use_cache=False).logits - own.model(text, use_cache=False).logits
    assert float(difference[0, -1].abs().max()) > 1e-6


def test_held_rows_end_no_patch_and_change_nothing_that_stays(own):
    """Catches a global model that runs while latents are stale, and a draft that the next pass still sees."""
    text = list(TEXT)
    cache, runs = own.allocate(1, 200), []
    own.prefill(cache, [0], torch.tensor([text[:30]]), [30])
    hook = own.model.model.global_model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    with stale.reading_on(own, cache, [0]) as read:
        drafted = read(torch.tensor([text[30:50]]))
    hook.remove()
    assert not runs and cache.lengths == [30]
    whole = own.model(torch.tensor([text[:50]]), use_cache=False).logits[0]
    first = next(n for n in range(30, 50) if ends_of(text, 4)[n])
    # up to the end of the anchor's patch nothing is stale
    torch.testing.assert_close(drafted[0, : first - 30], whole[30:first], rtol=0, atol=1e-10)
    assert float((drafted[0, first - 30 :] - whole[first:]).abs().max()) > 1e-4
    chain = Draft.chain(torch.tensor([text[31:50]]), torch.tensor([19]))
    found = own.verify(cache, [0], torch.tensor([text[30]]), chain).logits[0]
    torch.testing.assert_close(found, whole[30:50], rtol=0, atol=1e-10)


def test_a_folder_is_loaded_as_any_other(tmp_path):
    """Catches a config, weights or tokenizer that come back otherwise."""
    byte_model(vocab_size=258, eos_token_id=256).float().save_pretrained(tmp_path)
    bytes_and_patches.tokenizer().save_pretrained(tmp_path)
    loaded = load_target(tmp_path, dtype="float64")
    text = "naïve\n    x_1 = 'é'\t"
    assert loaded.encode(text) == list(text.encode()) and loaded.decode(loaded.encode(text)) == text
    assert loaded.selftest.failed is None and loaded.spec.mode == "tree"
    assert loaded.mask_token == 257 and loaded.spec.vocabulary == 258 and loaded.detokenizer is not None
    wanted = byte_model(vocab_size=258, eos_token_id=256).float().double()
    ids = torch.tensor([list(TEXT)])
    torch.testing.assert_close(loaded.model(ids, use_cache=False).logits, wanted(ids, use_cache=False).logits)
    [one] = generate(tmp_path, text, "stale_latent", max_new_tokens=12)
    assert len(one.tokens) == 12 or one.finish_reason == "stop"


def test_what_it_cannot_do_is_refused(own, target):
    """Catches a compiled step whose branch was taken once for all, a probe without ids."""
    with pytest.raises(NotCompiled, match="global model"):
        own.compile()
    with pytest.raises(TargetError, match="probe"):
        own.check_probe()
    with pytest.raises(DrafterError, match="bytes and patches"):
        stale_latent.build(stale_latent.Config(), target)
