"""SJD2's window; what it shares with other trained targets is in `test_target_models.py`."""

import torch

from outrider.generation import generate
from outrider.lab.drafters import jacobi_denoising
from outrider.lab.probe_rows import rows_after
from outrider.nn.drafting import trees

CONFIG = jacobi_denoising.Config(window=3, levels=2)


def test_places_stand_behind_the_last_node_and_see_it_and_those_before():
    """Catches a place that sees a later one, another text's padding, or stands at another's position."""
    draft = trees.of_lists([[5, 6], [7]], [[-1, 0], [-1]])
    mask, depths = draft.rows()
    last = torch.tensor(draft.live)
    seen = mask[torch.arange(2), last]
    mask, depths = rows_after(seen[:, None], depths.gather(1, last[:, None]), 3, causal=True)
    assert depths.tolist() == [[3, 4, 5], [2, 3, 4]]
    sees = [[set(row.nonzero()[:, 0].tolist()) for row in own] for own in mask]
    assert sees == [[{0, 1, 2, *range(3, 4 + j)} for j in range(3)], [{0, 1, *range(3, 4 + j)} for j in range(3)]]


def test_a_place_loses_noise_in_every_pass_and_is_drafted_without_any(target, prompts):
    """Catches levels and predictions that are not those of the shifted places, and noise that is drafted."""
    drafter, seen = jacobi_denoising.build(CONFIG, target), []
    observe = drafter.observe

    def watched(memory, state, draft, accepted, scores):
        before = None if memory[0] is None else list(memory[0].levels)
        observe(memory, state, draft, accepted, scores)
        rows = torch.cat([scores.logits[0, : draft.live[0] + 1], target.head(scores.probe[0])])
        assert torch.equal(memory[0].logits, rows[len(accepted.paths[0]) + 1 :][:6])
        seen.append((before, draft.live[0], len(accepted.paths[0]), list(memory[0].levels)))

    drafter.observe = watched
    generate(target, prompts[0], drafter, max_new_tokens=20)
    assert seen[0] == (None, 0, 0, [1, 1, 1]) and seen[1] == ([1, 1, 1], 0, 0, [0, 0, 1])
    assert any(drafted for _, drafted, _, _ in seen)
    for before, drafted, count, later in seen[1:]:
        assert drafted <= before.count(0) and later == sorted(later)
        places = [*before, *[2] * 9][: drafted + 3]
        assert later == [max(0, level - 1) for level in [*places[count + 1 :], 2]][:6]


def test_no_noise_is_the_embedding_and_all_noise_forgets_it():
    """Catches shares that are the wrong way round."""
    words, noise = torch.ones(2, 4), torch.full((2, 4), 9.0)
    assert jacobi_denoising.noised(words, noise, torch.tensor([0.0, 1.0])).tolist() == [[1.0] * 4, [9.0] * 4]


def test_windows_of_training_hold_what_the_model_guesses(target):
    """Catches a window that is shifted or knows the text to come, and noise that falls along it."""
    model = jacobi_denoising.TargetModel(CONFIG.model_copy(update={"levels": 1}), target).double()
    text, at = torch.tensor([[5, 9, 17, 3, 11, 12, 13, 2]]), torch.tensor([[2]])
    likeliest = int(target.model(text).logits[0, 2].argmax())
    words, patterns = model.words(torch.arange(64)), set()
    for seed in range(40):
        torch.manual_seed(seed)
        inputs = model.inputs(text, torch.ones_like(text), at)[0]
        is_clean = (inputs[:, None] == words).all(-1)
        patterns.add(tuple(is_clean.any(-1).tolist()))
        assert not is_clean[0].any() or is_clean[0, likeliest]
    assert patterns == {(True,) * n + (False,) * (3 - n) for n in range(4)}
