"""Every odd input is taken as what it is, or refused in a sentence; nothing is answered as something else.  What is no
target is refused by its name."""

import itertools
import logging
import math

import numpy as np
import pytest
import torch
from conftest import tiny_model
from contracts.parties import TableTarget
from transformers import BatchEncoding

from outrider.errors import ConfigError, DataError, TargetError
from outrider.generation import generate, stream
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target
from outrider.targets.text.prompts import listed, single

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
IDS, PAIR = [3, 1, 2], [[3, 1, 2], [4, 5, 6]]
TAKEN = {
    "text": ("a", ["a"]), "texts": (("a", "b"), ["a", "b"]), "a generator": ((text for text in "ab"), ["a", "b"]),
    "nothing": ([], []), "ids": (IDS, [IDS]), "a tuple of ids": (tuple(IDS), [IDS]), "a range": (range(3), [[0, 1, 2]]),
    "numpy's ids": (list(np.array(IDS)), [IDS]), "a tensor": (torch.tensor(IDS), [IDS]),
    "an array": (np.array(IDS, dtype=np.uint8), [IDS]), "a tensor of two": (torch.tensor(PAIR), PAIR),
    "an array of two": (np.array(PAIR), PAIR), "tensors": ([torch.tensor(IDS), torch.tensor([7])], [IDS, [7]]),
    "tensors of a row": ([torch.tensor([IDS]), torch.tensor([[7]])], [IDS, [7]]),
    "tensors of no dimension": ([torch.tensor(3), torch.tensor(1)], [[3, 1]]),
    "a tokenized text": (BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}), [IDS]),
    "tokenized texts": (
        BatchEncoding({"input_ids": torch.tensor(PAIR), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]])}),
        [[1, 2], [4, 5]],
    ),
    "tokenized, no mask": ({"input_ids": np.array(PAIR)}, PAIR),
    "a list of tokenized": ([{"input_ids": IDS}, {"input_ids": [[7]]}], [IDS, [7]]),
    "a message": (CHAT[0], [CHAT[:1]]), "a chat": (CHAT, [CHAT]), "chats": ([CHAT, CHAT[:1]], [CHAT, CHAT[:1]]),
    "a mixture": (["a", IDS, CHAT], ["a", IDS, CHAT]),
}  # fmt: skip
REFUSED = [
    None, 5, 1.5, True, b"ab", {"prompt": "a"}, ["a", None], [1.0, 2.0], [True, False], torch.tensor([1.0]),
    np.array([True]), [CHAT[0], 3], [[[1, 2], [3]]], [1, "a"], [{"content": "a"}], torch.tensor(3),
    torch.zeros(2, 2, 2, dtype=torch.int64),
]  # fmt: skip
TABLE = TableTarget.random(6)


def test_a_prompt_is_taken_as_what_it_is():
    """Catches a tokenizer's output of which the keys are continued."""
    for name, (given, wanted) in TAKEN.items():
        found = listed(given)
        assert found == wanted, name
        assert all(type(token) is int for prompt in found if isinstance(prompt[0], int) for token in prompt), name
        if len(wanted) == 1:
            assert single(given) == wanted[0], name


def test_what_is_no_prompt_is_refused(target):
    """Catches an AttributeError from within, and 1.0 or True taken for token 1."""
    for given, call in itertools.product(REFUSED, (generate, stream)):
        with pytest.raises(DataError):
            call(target, given, max_new_tokens=3)


def test_a_tokenizers_output_is_continued_as_its_ids(target):
    """Catches the words `input_ids` and `attention_mask` in place of the text."""
    (wanted,) = generate(target, IDS, max_new_tokens=4)
    padded = BatchEncoding({"input_ids": torch.tensor([[0, *IDS]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])})
    for given in (padded, torch.tensor(IDS), np.array([IDS]), iter([IDS])):
        assert [found.tokens for found in generate(target, given, max_new_tokens=4)] == [wanted.tokens]
    assert target.encode(padded) == target.encode(torch.tensor(IDS)) == IDS


def test_a_count_that_is_no_whole_number_is_refused_by_name():
    """Catches True as a count of one, and a TypeError of some comparison."""
    for name, value in itertools.product(("max_new_tokens", "slots"), (1.5, 3.0, "3", True, None, math.nan)):
        with pytest.raises(ConfigError, match=name):
            generate(TABLE, [1], **{"max_new_tokens": 3, name: value})
    assert len(generate(TABLE, [1], max_new_tokens=np.int64(3), slots=np.int32(2))[0].tokens) == 3


def test_a_setting_that_float32_cant_hold_is_refused_by_name():
    """Catches a temperature that becomes infinity in float32, and a text or a bool in place of a number."""
    wrong = ("0.7", True, None, [0.7], torch.tensor(0.7), 1e39, 1e300, 10**400)
    for name in ("temperature", "top_p", "repetition_penalty", "frequency_penalty"):
        for value in wrong:
            with pytest.raises(ConfigError, match=name):
                Sampling(**{name: value})


def test_a_setting_that_float32_rounds_to_0_means_what_it_is_near_to():
    """Catches a top_p that keeps no token at all, whose distribution is 0 / 0."""
    for name in ("temperature", "top_p", "min_p", "typical_p"):
        for dtype in (torch.float32, torch.float64):
            settings = Sampling(**{"temperature": 1.0, name: 1e-320})
            p = distribution(torch.tensor([[1.0, 3.0, 2.0]], dtype=dtype), Settings.of([settings]))
            assert p.sum() == pytest.approx(1.0)
            if name in ("temperature", "top_p"):
                assert p[0].tolist() == [0.0, 1.0, 0.0]


def test_a_count_of_a_sampling_is_a_whole_number():
    """Catches top_k=3.0, which fails at the first step, and True."""
    for name in ("top_k", "seed", "min_new_tokens", "logprobs"):
        for value in ("3", True, 3.0, [3]):
            with pytest.raises(ConfigError, match=name):
                Sampling(**{name: value})
        assert getattr(Sampling(**{name: np.int64(3)}), name) == 3


def test_tokens_and_biases_are_not_rounded():
    """Catches token 1.5 that becomes token 1."""
    for name, value in (
        ("logit_bias", {1.5: 2.0}), ("logit_bias", {1: "2"}), ("logit_bias", {1: 1e39}), ("logit_bias", 5),
        ("bad_words", [[1.5]]), ("bad_words", [["a"]]), ("bad_words", [5]), ("processors", 5),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            Sampling(**{name: value})


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, seed=1), Sampling(0.8, top_k=3)], ids=["greedy", "seed", "top_k"]
)
def test_logits_that_are_no_numbers_are_an_error_that_names_them(sampling):
    """Catches token 0 for ever, which is what the argmax of nothing but NaN is."""
    for value in (math.nan, math.inf, -math.inf):
        table = TABLE.table.clone()
        table[1, 2] = value
        with pytest.raises(TargetError, match=f"logits are {value}"):
            generate(TableTarget(table), [[1, 1], [1, 2]], max_new_tokens=3, sampling=sampling)
    for value in (math.nan, math.inf):
        table = TABLE.table.clone()
        table[1, 2, 4] = value  # one among numbers
        with pytest.raises(TargetError, match="nan|inf"):
            generate(TableTarget(table), [1, 2], max_new_tokens=3, sampling=sampling)


def test_a_model_with_weights_that_are_not_finite_is_refused():
    """Catches a text of token 0 from a damaged checkpoint."""
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[3, 2] = float("nan")
    with pytest.raises(TargetError):
        generate(load_target(model), [1, 2], max_new_tokens=3)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    """Catches a traceback of another library where a name was mistyped, or a JSON error without the target's name."""
    for name, config in (("nowhere", None), ("empty", ""), ("broken", "{"), ("odd", '{"model_type": "no_such_one"}')):
        if config is not None:
            (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(config)
        with pytest.raises(TargetError, match=name):
            load_target(tmp_path / name)


def test_a_dtype_that_is_none_is_refused(tmp_path):
    """Catches an attribute error of torch."""
    tiny_model().save_pretrained(path := tmp_path)
    for dtype in ("float12", "int64", "nn"):
        with pytest.raises(TargetError, match="dtype"):
            load_target(path, dtype=dtype)
    assert load_target(path, dtype="float64").spec.dtype == "float64"
    assert load_target(path, dtype=torch.bfloat16).spec.dtype == "bfloat16"


def test_a_folder_without_a_tokenizer_is_served_with_ids(tmp_path, caplog):
    """Catches a target that can't be used, or that says nothing of what it lacks."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        target = load_target(tmp_path, dtype="float64")
    assert "token ids" in caplog.text
    assert target.tokenizer is None
    assert target.spec.tokenizer_hash is None
    assert target.decode([1, 2]) == ""
    assert target.encode([1, 2]) == [1, 2]
    direct = load_target(model)
    assert target.spec.weights_hash == direct.spec.weights_hash
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(target.read(tokens)[0], direct.read(tokens)[0])
