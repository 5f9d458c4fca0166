"""The local head: what it reads in training and serving, its correction by hand, and training on text alone."""

import pytest
import torch
from tiny import randomise

from outrider.checkpoint import save
from outrider.data.answers.store import Answer
from outrider.data.features.live import TextAlone
from outrider.data.overlap.contamination import sources_of
from outrider.drafters import dflash, dspark
from outrider.errors import ConfigError
from outrider.generation import generate
from outrider.lab.drafters import local_head
from outrider.loading import load_drafter

OWN = {"gru": 12, "rank": 6, "context": 3}
BLOCK = {
    "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 3, "taps": (0, 2),
    "mask_token": 3,
}  # fmt: skip


def head_of(target, **choices) -> local_head.Model:
    torch.manual_seed(0)
    return randomise(local_head.Model(local_head.Config(**(OWN | choices)), target), 0.5)  # type: ignore[return-value]


def stored(folder, model, target) -> str:
    save(folder, model, {})
    return str(folder)


@pytest.fixture
def folders(target, tmp_path):
    """Checkpoints of a dflash, a dspark and a head."""
    torch.manual_seed(1)
    blocks = [
        randomise(method.Model(method.Config(**BLOCK), target), 0.3)  # type: ignore[attr-defined]
        for method in (dflash, dspark)
    ]
    models = dict(zip(("dflash", "dspark", "head"), [*blocks, head_of(target)], strict=True))
    return {name: stored(tmp_path / name, model, target) for name, model in models.items()}


def fused(target, folders, base: str, **choices):
    return load_drafter("local_head", target, base=folders[base], head=folders["head"], **choices)


def test_a_block_is_read_from_its_own_start(target):
    """Catches a state that goes on from the block or the document before, and a block that begins elsewhere."""
    model = head_of(target)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 0]])
    with torch.no_grad():
        read = model.read(tokens, documents)[0]
        for at, context in {0: [5], 1: [5, 6], 2: [5, 6, 7], 3: [8], 4: [9], 5: [9, 10]}.items():
            state = model.gru.start(model.words(torch.tensor(5)))
            for token in context:
                state = model.gru(model.words(torch.tensor(token)), state)
            torch.testing.assert_close(read[at], model.down(state))
        assert not read[6].any()


@pytest.mark.parametrize("base", ["dflash", "dspark"])
def test_without_weight_the_base_drafts(target, prompts, folders, base):
    """Catches a row that takes another row's candidates, and a head that is read although it has no weight."""
    alone = generate(target, prompts, load_drafter(folders[base], target), max_new_tokens=24, policy="fixed")
    drafter = fused(target, folders, base, local=0, prior=0, candidates=64)
    with_head = generate(target, prompts, drafter, max_new_tokens=24, policy="fixed")
    assert [one.tokens for one in with_head] == [one.tokens for one in alone]
    assert [one.steps for one in with_head] == [one.steps for one in alone]


@pytest.mark.parametrize("base", ["dflash", "dspark"])
def test_a_row_is_corrected_by_what_was_drafted_before_it(target, folders, base):
    """Catches a head that reads the anchor twice or not at all, a prior that is added, and weights that are swapped."""
    drafter, head = fused(target, folders, base, local=0.7, prior=0.4, candidates=5), head_of(target).to(torch.float64)
    head.log_share.copy_(drafter.model.head.log_share)
    model, plain_model = drafter.model, load_drafter(folders[base], target).model
    states = torch.randn(1, 3, target.spec.hidden, generator=torch.Generator().manual_seed(2)).to(model.dtype)
    chosen = [7, 21, 4]
    plain_logits = plain_model.decode(states, torch.tensor([9]), lambda logits, row: torch.tensor([chosen[row]]))[1]
    model.base.forward = lambda *inputs: model.base.decode(states, inputs[2], inputs[-1])
    with torch.no_grad():
        _, logits, _ = model(
            None, None, torch.tensor([9]), None, None, None, lambda _, row: torch.tensor([chosen[row]])
        )
        read = head.gru.start(head.words(torch.tensor([9])))
        for row, token in enumerate([9, *chosen[:-1]]):
            read = head.gru(head.words(torch.tensor([token])), read)
            best = plain_logits[0, row].topk(5)
            added = 0.7 * head.logits(head.down(read))[0, best.indices] - 0.4 * head.log_share[best.indices]
            expected = torch.full_like(plain_logits[0, row], -torch.inf)
            expected[best.indices] = best.values + added
            torch.testing.assert_close(logits[0, row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}])
def test_texts_are_the_targets_own(target, prompts, folders, sampling):
    plain = generate(target, prompts, max_new_tokens=24, **sampling)
    drafted = generate(target, prompts, fused(target, folders, "dspark"), max_new_tokens=24, policy="fixed", **sampling)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_text_alone_is_its_own_teacher(target, monkeypatch):
    """Catches a teacher that is one token late, and a pass of the target."""
    monkeypatch.setattr(type(target), "read", lambda *_: pytest.fail("the target was read"))
    answers = [Answer(f"a{i}", list(range(4 + i, 24 + i)), [(4, 20)]) for i in range(3)]
    source = TextAlone(target, answers, (), batch=2, length=64)
    batch = source.batch(0)
    model = head_of(target)
    rows = model.predict(batch)
    for _, teacher, part in rows.chunks(16):
        assert torch.equal(teacher.argmax(-1), rows.labels[part])
        assert teacher.softmax(-1).amax() > 1 - 1e-6
    assert batch.taps.shape[2] == 0 and batch.hidden.shape[2] == 0


def test_bases_that_cannot_be_corrected_are_refused(target, folders):
    with pytest.raises(ConfigError, match="is no block drafter"):
        load_drafter("local_head", target, base="ngram", head=folders["head"])
    with pytest.raises(ConfigError, match="is no trained local_head"):
        load_drafter("local_head", target, base=folders["dflash"], head=folders["dspark"])
    with pytest.raises(ConfigError, match="belong together"):
        load_drafter("local_head", target, base=folders["dflash"])


def test_the_texts_of_base_and_head_are_looked_up(folders):
    """Catches an evaluation on texts that the head was trained on, reported as clean."""
    choice = {"kind": "local_head", "base": folders["dflash"], "head": folders["head"]}
    assert [source.name for source in sources_of(choice)] == [folders["dflash"], folders["head"]]
