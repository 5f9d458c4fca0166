"""Speculative decoding in torch alone: a drafter proposes a tree of tokens, the target checks the tree in one pass.

Two transformers with random weights write 2,000 texts, whose distribution is compared with the target's own.
Sources: arXiv 2211.17192 and 2302.01318 (the acceptance rule), 2305.09781 (trees).
"""

from itertools import product

import torch
from torch import Tensor, nn

torch.set_grad_enabled(False)
VOCABULARY, HIDDEN, CONTEXT = 4, 16, 12
WIDTHS = (2, 1)  # the tree: two tokens that may come next, and one after each of them


class Transformer(nn.Module):
    """Two layers of attention, with a cache of the keys and values of the S tokens that were read."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.cache = [torch.empty(2, 0, HIDDEN) for _ in self.layers]  # [2, S, HIDDEN]

    def forward(self, tokens: list[int], positions: list[int], mask: Tensor) -> Tensor:
        """The distribution after each of n tokens, [n, VOCABULARY].  mask [n, n]: which of them each one attends to."""
        x = self.embed(torch.tensor(tokens)) + self.position(torch.tensor(positions))
        for i, layer in enumerate(self.layers):
            query, *new = layer(x).chunk(3, -1)
            self.cache[i] = torch.cat([self.cache[i], torch.stack(new)], 1)
            before = self.cache[i].shape[1] - len(tokens)
            whole = nn.functional.pad(mask, (before, 0), value=True)  # and the text before
            x = x + nn.functional.scaled_dot_product_attention(query, *self.cache[i], attn_mask=whole)
        return (2 * self.head(x)).softmax(-1)

    def read(self, text: list[int]) -> Tensor:
        """Read a text from its beginning.  Returns the distribution after it, [VOCABULARY]."""
        self.cache = [layer[:, :0] for layer in self.cache]
        return self(text, list(range(len(text))), torch.ones(len(text), len(text), dtype=torch.bool).tril())[-1]


def propose(drafter: Transformer, text: list[int]) -> tuple[list[int], list[int], list[Tensor]]:
    """A tree under the last token: N tokens, their parents (-1 is the last token), and q, what each was drawn from."""
    tokens, parents, q, level = [], [], [], {-1: text}
    for width in WIDTHS:
        above, level = level, {}
        for parent, before in above.items():
            left = drafter.read(before)
            for _ in range(width):  # siblings differ: what was drawn can't be drawn again
                token = int(left.multinomial(1))
                level[len(tokens)] = [*before, token]
                tokens, parents, q = [*tokens, token], [*parents, parent], [*q, left]
                left = nn.functional.normalize(left.index_fill(0, torch.tensor(token), 0.0), p=1, dim=0)
    return tokens, parents, q


def verify(target: Transformer, text: list[int], tokens: list[int], parents: list[int]) -> Tensor:
    """One pass over the last token and the tree.  Returns p, the distribution after each, [1 + N, VOCABULARY]."""
    depths, mask = [0], torch.eye(1 + len(tokens), dtype=torch.bool)
    for node, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        mask[node + 1] |= mask[parent + 1]  # a node attends to its ancestors, not to its siblings
    return target([text[-1], *tokens], [len(text) - 1 + depth for depth in depths], mask)


def accept(tokens: list[int], parents: list[int], q: list[Tensor], p: Tensor, node: int = -1) -> list[int]:
    """The acceptance rule: the accepted tokens and one more after `node`, distributed as p whatever q is."""
    r = p[node + 1]
    for child in [n for n, parent in enumerate(parents) if parent == node]:
        if torch.rand(()) < r[tokens[child]] / q[child][tokens[child]]:
            return [child, *accept(tokens, parents, q, p, child)]
        r = nn.functional.normalize((r - q[child]).clamp(min=0), p=1, dim=0)  # left for its siblings and the target
    return [int(r.multinomial(1))]


def write(target: Transformer, drafter: Transformer, text: list[int], length: int) -> tuple[list[int], int]:
    """The text continued to at least `length` tokens, and how many passes of the target that took."""
    passes, _ = 0, target.read(text[:-1])
    while len(text) < length:
        tokens, parents, q = propose(drafter, text)
        *path, following = accept(tokens, parents, q, verify(target, text, tokens, parents))
        read = [*range(len(text)), *(len(text) + node for node in path)]
        target.cache = [layer[:, read] for layer in target.cache]  # rejected tokens are forgotten
        text, passes = [*text, *(tokens[node] for node in path), following], passes + 1
    return text, passes


target, drafter, prompt, new, count = Transformer(seed=1), Transformer(seed=2), [0, 1, 2], 3, 2000
texts, passes = zip(*(write(target, drafter, prompt, len(prompt) + new) for _ in range(count)), strict=True)
print(f"{sum(len(text) - len(prompt) for text in texts) / sum(passes):.2f} tokens per pass of the target")
distance = noise = 0.0
for text in product(range(VOCABULARY), repeat=new):
    p = torch.stack([target.read([*prompt, *text[:i]])[token] for i, token in enumerate(text)]).prod().item()
    distance += abs(sum(tuple(found[3:6]) == text for found in texts) / count - p) / 2
    noise += (p * (1 - p) / (2 * torch.pi * count)) ** 0.5
print(f"distance from the target's own distribution: {distance:.3f}; expected by chance: {noise:.3f}")
assert distance < 1.5 * noise, "these texts are not distributed as the target's own"
