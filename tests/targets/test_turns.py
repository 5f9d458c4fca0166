"""Where a turn ends, by generation_config, tokenizer and chat template: texts end there, and nothing past it trains."""

import logging

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import outrider
from outrider.data.rendering import render
from outrider.errors import DataError
from outrider.targets.text.turns import Closing, closing_of, runs_on
from tests.conftest import tiny_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(template: str | None = CHATML, end: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Letters, special tokens 0 to 2, and a template."""
    letters = dict.fromkeys("abcdefghijklmnopqrstuvwxyz .,\nYC?")
    vocabulary = {name: token for token, name in enumerate([*SPECIAL, *letters])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


def target_of(tokenizer: PreTrainedTokenizerFast, ends: int | list[int] | None):
    model = tiny_model(4)
    model.generation_config.eos_token_id = ends
    target = outrider.load_target(model)
    target.tokenizer = tokenizer
    return target


def test_the_end_of_a_turn_is_read_off_the_template():
    """Catches a template whose end is not the tokenizer's: base checkpoints' `<|endoftext|>` beside `<|im_end|>`."""
    line = tokenizer_of().convert_tokens_to_ids("\n")
    assert closing_of(tokenizer_of()) == Closing(2, (line,))
    for template in (None, "{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ messages + 1 }}"):
        assert closing_of(tokenizer_of(template)) is None
    tokenizer = tokenizer_of()
    closing_of(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<|endoftext|>"
    assert closing_of(tokenizer) == Closing(0, ()), "a template that was set afterwards counts"


@pytest.mark.parametrize(("ends", "wanted"), [(0, {0, 2}), ([0, 2], {0, 2}), (None, {2}), (2, {2})])
def test_a_text_ends_where_the_template_ends_a_turn(ends, wanted):
    """Catches answers that run on into turns of their own, since generation_config names another end."""
    target = target_of(tokenizer_of(), ends)
    assert target.ends == wanted
    target.ends = frozenset({7})
    assert target.ends == {7}


def test_ends_that_differ_are_said_at_load(caplog, tmp_path):
    """Catches silence: the first sign would be answers that do not end."""
    model = tiny_model(4)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path)
    tokenizer_of(end="<|im_end|>").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        outrider.load_target(tmp_path)
    [line] = [record.getMessage() for record in caplog.records if "specifies the end token" in record.getMessage()]
    for place in ("tokenizer", "chat template"):
        assert f"its {place} specifies the end token '<|im_end|>' (2)" in line
    assert "its generation_config '<|endoftext|>' (0); texts end at '<|endoftext|>' (0), '<|im_end|>' (2)" in line
    caplog.clear()
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(tmp_path)
    outrider.load_target(tmp_path)
    assert "specifies the end token" not in caplog.text


def test_an_answer_that_runs_on_does_not_train():
    """Catches a drafter trained to go on after the end of a turn, by data made with the wrong end token."""
    tokenizer = tokenizer_of()
    chat = lambda answer: [{"role": "user", "content": "a b"}, {"role": "assistant", "content": answer}]
    fine, run_on = (render(tokenizer, chat(text), 200) for text in ("c d.", "c d.<|im_end|>\n<|im_start|>user\ne"))
    assert len(fine.learn) == 1 and not fine.unstable
    assert (run_on.learn, run_on.unstable) == ([], 1)
    cut = render(tokenizer, chat("c d."), len(fine.tokens) - 1)
    assert cut.learn and not cut.unstable, "cut in what closes the turn"
    marks = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
    tokenizer.chat_template = marks + "<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    assert runs_on("c<|im_end|>\nd", tokenizer) and not runs_on("c<|im_start|>", tokenizer)
    again = [*chat("c<|im_end|>d"), {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    both = render(tokenizer, again, 200)
    assert (len(both.learn), both.unstable) == (1, 1), "by marks, and only the answer that runs on"


def test_a_template_that_wrote_the_beginning_gets_no_second_one():
    """Catches `<s><s>`: a text that was rendered by the template, and then encoded as any other."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    post = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = post
    target = target_of(tokenizer, 0)
    assert target.encode("<|im_start|>a b")[:2] == [1, tokenizer.convert_tokens_to_ids("a")]
    assert target.encode("a b")[0] == 1 and target.encode("a b")[1] != 1
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    names = [("<|im_start|>", 1), ("<|im_end|>", end)]  # two tokens, as GLM has them, and no bos_token
    two = TemplateProcessing(single="<|im_start|> <|im_end|> $A", special_tokens=names)
    tokenizer.bos_token, tokenizer.backend_tokenizer.post_processor = None, two
    assert target.encode("<|im_start|><|im_end|>a b")[:3] == [1, end, tokenizer.convert_tokens_to_ids("a")]
    assert target.encode("a b")[:2] == [1, end] and target.encode("a b")[2] not in (1, end)


def test_a_text_with_a_token_that_has_no_embedding_says_so():
    """Catches an IndexError deep in a pass: a token was added to the tokenizer, and the model not resized."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([f"<new {n}>" for n in range(64)])
    target = target_of(tokenizer, 0)
    with pytest.raises(DataError, match=r"token '<new \d+>' \(\d+\), but the model's embedding has 64 rows: resize"):
        target.encode("a <new 63> b")
    assert torch.tensor(target.encode("a <new 2> b")).max() < 64


def test_a_text_goes_on_from_its_prompt_and_an_answer_stands_by_itself():
    """Catches `the quickbrown`: decoders of SentencePiece drop a text's first space, also behind a prompt.

    An answer to chat messages goes on from nothing; streamed or whole, the text is the same."""
    names = [*SPECIAL, *(f"▁{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), *".,▁"]
    raw = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="▁a"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens(SPECIAL)
    target = target_of(PreTrainedTokenizerFast(tokenizer_object=raw), None)
    target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for prompt in ("a b", [4, 5]):
        found = outrider.generate(target, prompt, max_new_tokens=5)[0]
        ids = target.encode(prompt)
        whole, shown = target.decode(ids + found.tokens), target.decode(ids)
        assert shown + found.text == whole
        assert "".join(text for _, _, text, _ in outrider.stream(target, prompt, max_new_tokens=5)) == found.text
    answer = outrider.generate(target, [[{"role": "user", "content": "a b"}]], max_new_tokens=5)[0]
    assert answer.text == target.decode(answer.tokens)
