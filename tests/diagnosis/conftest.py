"""A target that has learnt a small language, and a drafter that needs the target's layers to draft it.

A text is a topic and a letter, then letters, each following from the one before by a table of the topic: without the
topic, which only the target's states tell, a drafter guesses one in four tokens.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from tiny import make_tokenizer, write_run_file

from outrider.runs import stages

LETTERS, TOPICS, LENGTH = "abcdefgh", "WXYZ", 24
TABLES = {topic: random.Random(topic).sample(range(8), 8) for topic in TOPICS}


def answer(prompt: str) -> str:
    """The text after a topic and a letter."""
    at, text = LETTERS.index(prompt[1]), ""
    for _ in range(LENGTH):
        at = TABLES[prompt[0]][at]
        text += LETTERS[at]
    return text


def prompts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(TOPICS) + draw.choice(LETTERS) + f"{draw.randrange(10**6)}" for _ in range(count)]


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the target."""
    folder = tmp_path_factory.mktemp("language")
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, initializer_range=0.05).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    texts = [(prompt, answer(prompt)) for prompt in prompts(256, 1)]
    rows = [_tokens(tokenizer, prompt, text) for prompt, text in texts]
    for step in range(240):
        batch = torch.nn.utils.rnn.pad_sequence(rows[step * 16 % 256 :][:16], batch_first=True)
        logits = model.train()(batch).logits
        loss = F.cross_entropy(logits[:, 8:-1].flatten(0, 1), batch[:, 9:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokenizer.save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return folder


def _tokens(tokenizer: Any, prompt: str, text: str) -> torch.Tensor:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    return torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))


def written(path: Path, texts: Sequence[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"id": f"{path.stem}{i}", "prompt": text}) + "\n" for i, text in enumerate(texts))
    )
    return path


@pytest.fixture(scope="session")
def trained(language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a drafter for the language."""
    folder = tmp_path_factory.mktemp("trained")
    source = written(folder / "mine.jsonl", prompts(160, 2))
    drafter = {
        "kind": "dspark",
        "layers": 1,
        "block": 3,
        "rank": 8,
        "taps": [0, 1, 2],
        "confidence": False,
        "mask_token": 260,
    }
    file = write_run_file(
        folder / "mine.yaml", language, drafter=drafter, evaluate=None,
        prepare={"conversations": str(source), "count": 160, "length": 64, "max_new_tokens": 32, "slots": 80,
                 "temperature": 0.5, "top_p": 1.0, "top_k": 0},
        train={"steps": 120, "batch": 8, "lr": 1e-2, "dtype": "float32", "optimizer": "muon", "loss": {"kl": 1.0},
               "log_every": 60, "save_every": 120, "held_out": 10},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stages.run(file, ["target.compile=false"])
    return folder / "runs" / "mine" / "checkpoint"
