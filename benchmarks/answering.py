"""Ways to answer prompts that benchmarks compare: Outrider, transformers' `generate`, and llama.cpp's server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import llama_cpp
from outrider import generate
from outrider.fast.runner import using

Answers = Callable[[list[list[int]], int, int], list[list[int]]]
"""(prompts, new tokens, number of prompts at a time) → the tokens of the answers, without the end token."""


def outrider(
    target: Any, drafter: Any, is_one_call: bool, prompts: list[list[int]], new: int, slots: int
) -> list[list[int]]:  # fmt: skip
    with using("built" if is_one_call else "none"):
        answers = generate(target, prompts, drafter, max_new_tokens=new, slots=slots)
    return [without_ends(target, answer.tokens) for answer in answers]


@torch.inference_mode()
def transformers(target: Any, prompts: list[list[int]], new: int, slots: int) -> list[list[int]]:
    """One prompt at a time, whatever `slots` says."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        [text] = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=min(target.ends)
        ).tolist()
        texts.append(without_ends(target, text[len(prompt) :]))
    return texts


@contextmanager
def llama(target: Any, binary: Path, model: Path, slots: int, more: Sequence[object]) -> Iterator[Answers]:
    threads = torch.get_num_threads()
    with llama_cpp.serving(binary, model, target.spec.context, threads, more, slots) as client:

        def ask(prompt: list[int], new: int) -> list[int]:
            body = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True}
            reply = client.post("/completion", json=body).raise_for_status().json()
            return without_ends(target, reply["tokens"])

        yield partial(pooled, ask)


def pooled(
    ask: Callable[[list[int], int], list[int]], prompts: list[list[int]], new: int, slots: int
) -> list[list[int]]:
    """A server's answers to this many clients, each with one request at a time."""
    with ThreadPoolExecutor(slots) as clients:
        return list(clients.map(ask, prompts, itertools.repeat(new)))


def without_ends(target: Any, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token not in target.ends]
