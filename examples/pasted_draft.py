"""A draft pasted as an assistant message, as articles recommend, is not speculative decoding: how far off is it?

    $ python examples/pasted_draft.py

The recipe: a small model answers, its answer goes into the conversation, and the large model answers after it.  It
reads the draft as something that was said; no token is compared with one of its own, and none is drawn again.  So the
answer has another distribution.  Total variation: 0 is the same distribution, 1 has nothing in common.
"""

import torch
from torch import Tensor

import outrider
from outrider import demo
from outrider.targets.transformers import TransformersTarget

PROMPTS = ["import os\nimport re\n\n\ndef find(path, ", "class Stack:\n    def __init__(self):\n        self.", "for "]
DRAFTS, LENGTH, TEXTS = 64, 8, 1000
DRAWN = outrider.Sampling(temperature=1.0)


@torch.inference_mode()
def next_token(model: TransformersTarget, text: list[int]) -> Tensor:
    """The distribution [V] of the token after a text."""
    hidden, _ = model.read(torch.tensor([text]), ())
    return model.head(hidden[0, -1]).double().softmax(-1)


def pasted(target: TransformersTarget, small: TransformersTarget, prompt: str) -> Tensor:
    """The distribution of the answer's first token by the recipe: the mean over drafts, each with its own weight."""
    drafts = outrider.generate(small, [prompt] * DRAFTS, max_new_tokens=LENGTH, sampling=DRAWN)
    asked = {"role": "user", "content": prompt}
    chats = [target.encode([asked, {"role": "assistant", "content": draft.text}]) for draft in drafts]
    return torch.stack([next_token(target, chat) for chat in chats]).mean(0)


def counted(target: TransformersTarget, drafter: outrider.Drafter | None, prompt: str) -> Tensor:
    """The first token's frequencies over many texts."""
    texts = outrider.generate(
        target, [prompt] * TEXTS, drafter, max_new_tokens=3, sampling=DRAWN, policy="fixed", slots=100
    )
    first = torch.tensor([text.tokens[0] for text in texts])
    return first.bincount(minlength=target.spec.vocabulary).double() / TEXTS


def main() -> None:
    target, small = outrider.load_target("demo"), outrider.load_target(demo.SMALL_MODEL)
    drafter = outrider.load_drafter("small_model", target)
    print("total variation of the first token      draft pasted    speculative    plain (by chance)")
    for prompt in PROMPTS:
        p = next_token(target, target.encode(prompt))
        found = pasted(target, small, prompt), counted(target, drafter, prompt), counted(target, None, prompt)
        away = [float((p - other).abs().sum() / 2) for other in found]
        print(f"{prompt[-30:]!r:38}  {away[0]:12.3f}  {away[1]:13.3f}  {away[2]:19.3f}")
        assert away[0] > 0.2, "the recipe changes what is written"
        assert away[1] < away[2] + 0.1, "speculative decoding does not"


if __name__ == "__main__":
    main()
