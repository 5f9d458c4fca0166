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


def test_patches_end_where_the_next_byte_is_uncertain(own):
    """Catches an entropy of another byte's prediction, and ends that depend on how a text is read."""
    text, model, seen = list(TEXT), own.model, []
    hook = model.model.global_model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model(torch.tensor([text]), use_cache=False)
    cache = None
    for part in (text[:7], text[7:30], *([byte] for byte in text[30:])):
        cache = model(torch.tensor([part]), cache=cache)[bytes_and_patches.CACHE]
    hook.remove()
    wanted = ends_of(model, text)
    assert seen[0][0].tolist() == torch.cat(seen[1:], 1)[0].tolist() == wanted and 20 < sum(wanted) < 50


def test_a_patch_reads_its_own_bytes_and_a_byte_all_patches_before_it():
    """Catches a patch that reads into the one before, and a byte that attends to a patch before it has ended."""
    ended = torch.tensor([[False, True, False, False, True, False]])
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    of_patch = Known(causal, torch.arange(6)[None]).of_patch(torch.arange(6)[None], ended)[0]
    assert [row.nonzero().flatten().tolist() for row in of_patch] == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5]]


def test_a_byte_that_may_see_no_latent_reads_none(own):
    """Catches what an earlier text left in a slot, read by a byte before the first patch has ended."""
    across, positions = own.model.model.to_patches[0], torch.arange(3)[None]
    states, latents = torch.randn(1, 3, 32).double(), torch.randn(1, 3, 48).double()
    mask = torch.tensor([[[False, False, False], [True, False, False], [True, False, True]]])
    found = across(states, latents, mask, positions, lambda keys, values: (keys, values))
    assert torch.equal(found[0, 0], states[0, 0]) and not torch.equal(found[0, 1], states[0, 1])


def test_notes_say_positions_exactly():
    """Catches positions that bfloat16 rounds."""
    positions = torch.tensor([[0, 1, 127, 128, 255, 257, 1001, 2047, 32_000, 32_767]])
    found = Known.of(torch.ones(1, 1, 1, dtype=torch.bool), byte_patches.notes_of(positions, torch.bfloat16))
    assert torch.equal(found.positions, positions)


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
    first = next(n for n in range(30, 50) if ends_of(own.model, text[:50])[n])
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
