"""Weights that change after loading, in every way that torch allows: the text is that of the weights as they are."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outrider
from outrider import kernels
from outrider.errors import TargetError
from outrider.kernels import contents, prepacked
from outrider.kernels.contents import Contents, digests_of
from outrider.targets.hf.transformers import TransformersTarget
from tests.conftest import tiny_model
from tests.drafters.proposals import watch

PROMPT = [5, 9, 2, 33, 7]


def data_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).data


def noisy(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)).to(tensor.dtype)


Q, DOWN, NORM, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight",
)  # fmt: skip


def swap_rows(model: nn.Module) -> None:
    data_of(model, DOWN)[[0, 5]] = data_of(model, DOWN)[[5, 0]]


def replace(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.self_attn.q_proj").weight = nn.Parameter(noisy(data_of(model, Q)))


def assign(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[DOWN] += 0.3
    model.load_state_dict(state, assign=True)


def average(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data.lerp_(noisy(weight), 0.2)


def through_numpy(model: nn.Module) -> None:
    data_of(model, DOWN).numpy()[3] *= -1


def prune(model: nn.Module) -> None:
    model.get_submodule("model.layers.2.mlp").down_proj.weight.data.masked_fill_(noisy(data_of(model, DOWN)) > 0.5, 0)


def digest(tensor: Tensor) -> int:
    return digests_of([tensor])[0]


def logits(target: TransformersTarget) -> Tensor:
    """Of the token after the prompt."""
    return target.prefill(target.allocate(1, 16), [0], torch.tensor([PROMPT]), [len(PROMPT)]).logits[0, -1]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "data.copy_": lambda model: data_of(model, Q).copy_(noisy(data_of(model, Q))),
    "data.add_": lambda model: data_of(model, DOWN).add_(noisy(data_of(model, DOWN))),
    "data.mul_": lambda model: data_of(model, DOWN).mul_(1.5),
    "data =": lambda model: setattr(model.get_parameter(DOWN), "data", noisy(data_of(model, DOWN))),
    "one value": lambda model: data_of(model, DOWN)[3].__setitem__(7, 9.0),
    "a row": lambda model: data_of(model, DOWN)[3].zero_(),
    "a column": lambda model: data_of(model, DOWN)[:, 3].zero_(),
    "two rows swapped": swap_rows,
    "a norm": lambda model: data_of(model, NORM).mul_(3),
    "embeddings": lambda model: data_of(model, EMBEDDING).add_(noisy(data_of(model, EMBEDDING))),
    "detach": lambda model: model.get_parameter(DOWN).detach().neg_(),
    "no_grad": lambda model: torch.no_grad()(lambda: model.get_parameter(DOWN).neg_())(),
    "inference_mode": lambda model: torch.inference_mode()(lambda: model.get_parameter(DOWN).neg_())(),
    "numpy": through_numpy, "a new parameter": replace, "load_state_dict": assign, "an average": average,
    "pruning": prune,
}  # fmt: skip


@pytest.fixture
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are packed in panels, whatever is fastest."""
    if kernels.library() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(prepacked, "_fastest", lambda layers: "panels")


@pytest.mark.parametrize("change", CHANGES)
def test_the_text_is_that_of_the_weights_as_they_are(change, in_panels):
    """Catches weights packed at loading and used after they changed: PEFT's merge, an average, `param.data.copy_`.

    The same change to a model that was never decoded gives the reference.  False alarm: a tie in float32; none here."""
    model, other = (tiny_model(3).float() for _ in range(2))
    target, ids = outrider.load_target(model), torch.tensor([PROMPT])
    outrider.generate(target, ids, max_new_tokens=12)
    before = logits(target)
    CHANGES[change](model)
    CHANGES[change](other)
    wanted = other.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()
    assert outrider.generate(target, ids, max_new_tokens=12)[0].tokens == wanted
    torch.testing.assert_close(logits(target), other(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
    assert (logits(target) - before).abs().max() > 1e-3, "the change is one that can be seen"
    layer = model.get_submodule("model.layers.2.mlp.down_proj")
    assert prepacked._weights[layer].stamp == prepacked._stamp(layer), "what changed is packed again"


def test_weights_that_are_held_are_not_hashed_until_they_are_let_go(in_panels, monkeypatch):
    """Catches an evaluation that pays for its target's weights in every text, and a change that is missed after it."""
    model, hashed, real = tiny_model(3).float(), [], contents._digest
    target = outrider.load_target(model)
    monkeypatch.setattr(contents, "_digest", lambda tensor: hashed.append(1) or real(tensor))
    with contents.held():
        outrider.generate(target, [PROMPT], max_new_tokens=2)
        first = len(hashed)
        outrider.generate(target, [PROMPT], max_new_tokens=2)
        assert len(hashed) == first
    model.lm_head.weight.data.mul_(-1)
    assert outrider.generate(target, [PROMPT], max_new_tokens=1)[0].tokens == [logits(target).argmax().item()]
    assert len(hashed) > first


def test_an_embedding_that_was_resized_is_refused_by_name(in_panels):
    """Catches logits of another width than the vocabulary that drafters, grammars and samplers were made for."""
    model = tiny_model(3).float()
    target = outrider.load_target(model)
    model.resize_token_embeddings(70)
    with pytest.raises(TargetError, match="replaced after it was loaded; load it again"):
        outrider.generate(target, [PROMPT], max_new_tokens=2)


@pytest.mark.parametrize("what", ["trunk", "layers"])
def test_layers_that_were_replaced_are_refused_by_name(what, in_panels):
    """Catches states that are read of layers which the model no longer has: wrong text, and no word of it."""
    model = tiny_model(3).float()
    target = outrider.load_target(model)
    if what == "trunk":
        words, model.model = model.model.embed_tokens, copy.deepcopy(model.model)
        model.model.embed_tokens = words
    else:
        model.model.layers = copy.deepcopy(model.model.layers)
    model.model.layers[1].mlp.down_proj.weight.data.neg_()
    with pytest.raises(TargetError, match="replaced after it was loaded; load it again"):
        outrider.generate(target, [PROMPT], max_new_tokens=2)


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "medusa", "ngram_embedding", "deer"])
def test_drafts_are_of_the_drafters_weights_as_they_are(kind, in_panels):
    """Catches a drafter that drafts by the weights that were packed when it was built."""

    target = outrider.load_target(tiny_model(3).float())
    drafter = outrider.load_drafter(kind, target, **({"mask_token": 3} if kind == "deer" else {}))
    for weight in drafter.model.parameters():
        weight.data.copy_(noisy(weight))

    def drafted() -> list[list[list[int]]]:
        seen = watch(drafter)
        outrider.generate(target, PROMPT, drafter, max_new_tokens=6)
        return [proposal.tokens for proposal in seen]

    packed = drafted()
    with prepacked.disabled():
        assert packed == drafted()


def test_a_model_made_in_inference_mode_is_decoded_and_watched(in_panels):
    """Catches `RuntimeError: Inference tensors do not track version counter` from a load under inference_mode."""
    with torch.inference_mode():
        target = outrider.load_target(tiny_model(3).float())
        before = outrider.generate(target, [PROMPT], max_new_tokens=4)[0].tokens
        assert outrider.generate(target, [PROMPT], max_new_tokens=4)[0].tokens == before
        target.model.get_parameter(DOWN).neg_()
        assert DOWN in target.refresh()
        torch.testing.assert_close(
            logits(target), target.model(torch.tensor([PROMPT])).logits[0, -1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("has_library", [True, False])
def test_every_value_counts(has_library, monkeypatch):
    """Catches a hash that samples, or that does not see the order: one bit anywhere, and two words swapped."""
    if not has_library:
        monkeypatch.setattr(contents.kernels, "library", lambda: None)
    weight = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(1))
    whole, words = digest(weight), weight.view(-1).view(torch.int32)
    assert digest(weight.clone()) == whole
    for at in (0, 1, 511, 512, 65_536, 100_000, len(words) - 1):
        words[at] ^= 1
        assert digest(weight) != whole, at
        words[at] ^= 1
    words[[5, 70_000]] = words[[70_000, 5]]
    assert digest(weight) != whole
    words[[5, 70_000]] = words[[70_000, 5]]
    assert len({whole, digest(-weight), digest(weight.roll(1)), digest(weight * 2), digest(weight.flip(0))}) == 5


def test_what_counts_writes_sees_a_write_that_torch_did_not_count():
    """Catches a graph or a pack, stamped by torch's counter, that goes on with the values of before."""
    layer = nn.Linear(4, 4)
    watched, counted = Contents(layer), layer.weight._version
    assert watched.changes() == []
    layer.weight.data[0, 0] += 1
    assert layer.weight._version == counted
    assert watched.changes() == ["weight"] and layer.weight._version > counted
    assert watched.changes() == []
