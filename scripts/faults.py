"""Plant faults into copies of the package, one at a time, and see that a test notices each.

python scripts/faults.py [--only N]

First the tests are run as they are: a test that fails without a fault has caught nothing.  Then every fault gets a copy
of its own, whose tests are run up to the first that fails.  Prints a line a fault and JSON at the end; exits with 1
where one is not caught, with 2 where a test fails without any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "outrider",
    "tests",
    "benchmarks",
    "recipes",
    "docs",
    "scripts",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)
IGNORED = shutil.ignore_patterns("__pycache__", "runs", "build", ".*")
"""What was made there: runs, and engines of gigabytes."""
SECONDS = 120
"""Longest that one of a fault's tests may take; a fault that only makes it hang is not caught."""


class Edit(NamedTuple):
    path: str
    """Under the repository's root; may be a glob, of whose files one holds the text."""
    old: str
    """Stands there exactly once."""
    new: str


class Fault(NamedTuple):
    name: str
    edits: list[Edit]
    tests: list[str]
    """Files or node ids, of which one must fail; the quickest stand first."""


CONTRACTS, SAMPLING = "tests/contracts/", "outrider/sampling/"
ACCEPT, STATE, DRAFT, LOOP, NOISE = (
    f"outrider/decoding/{name}.py" for name in ("accept", "state", "draft", "loop", "noise")
)
FAST, PREFIX, TEXT = (f"{SAMPLING}{name}.py" for name in ("fast", "prefix", "text"))
POLICY, SERVING = "outrider/policies/by_confidence.py", "outrider/nn/serving.py"
MEMORY, NGRAMS = "outrider/nn/memory.py", "outrider/targets/ngram_embedding.py"
RELAY, COUNTER = (f"outrider/policies/{name}.py" for name in ("relay", "counterfactual"))
TREES, CACHE = "outrider/nn/trees.py", "outrider/targets/cache.py"
ENUMERATED = f"{CONTRACTS}test_acceptance_rule_enumerated.py::test_what_is_emitted_follows_the_target_exactly"

FAULTS = [
    Fault(
        "a relay hands over one token late",
        [Edit(RELAY, "since >= self.min_tokens", "since > self.min_tokens")],
        ["tests/policies/test_relay.py::test_the_writers_change_exactly_where_they_should"],
    ),
    Fault(
        "the target adds a token of its own to a relayed segment",
        [Edit(RELAY, "return ending_in_draft(draft, accepted, is_whole)", "return accepted")],
        ["tests/policies/test_relay.py::test_the_writers_change_exactly_where_they_should"],
    ),
    Fault(
        "what changes with swapped words is preferred",
        [Edit(COUNTER, "scores - self.beta * divergences", "scores + self.beta * divergences")],
        ["tests/policies/test_counterfactual.py::test_a_biased_model_changes_its_choice_by_beta"],
    ),
    Fault(
        "a sibling's q is not renormalised after its elder sibling was rejected",
        [Edit(TREES, "left = rest / mass.clamp(min=1e-30)", "left = rest")],
        ["tests/nn/test_trees.py::test_q_is_the_distribution_each_node_was_drawn_from"],
    ),
    Fault(
        "the residual is not carried to the next sibling, which is tested against what its elder was",
        [Edit(ACCEPT, "residual(left, q), left)", "residual(p[torch.arange(slots), at + 1], q), left)")],
        [f"{ENUMERATED}[siblings-replacement]", f"{ENUMERATED}[siblings-without]"],
    ),
    Fault(
        "a rejected token's key stays in the target's cache",
        [Edit(CACHE, "[len(path) + 1 for path in paths]", "[min(len(path) + 2, self.width) for path in paths]")],
        ["tests/targets/test_cache.py"],
    ),
    Fault(
        "a tap is read one row off",
        [Edit(MEMORY, "(features[b], accepted.rows(b))", "(features[b], [0, *accepted.rows(b)[:-1]])")],
        [f"{CONTRACTS}test_restarts.py::test_every_drafter_begun_again_has_as_much_accepted[dflash]"],
    ),
    Fault(
        "the noise of a rejected draft is used again at the next step",
        [Edit(NOISE, "counter = counter + _mix(self.index + 1)", "pass")],
        ["tests/decoding/test_noise.py"],
    ),
    Fault(
        "the tree mask is one column wide: a node sees its sibling",
        [
            Edit(
                DRAFT,
                "sees[n + 1] |= sees[parent + 1]",
                "sees[n + 1] |= sees[parent + 1]\n        sees[n + 1, n] = True",
            )
        ],
        ["tests/decoding/test_draft.py"],
    ),
    Fault(
        "q is not the distribution drawn from: the temperature is left out of it",
        [Edit(STATE, "return q, streams.draw(q, depth,", "return logits.softmax(-1), streams.draw(q, depth,")],
        [
            f"{CONTRACTS}test_acceptance_rule.py::test_every_drafter_keeps_the_distribution_under_top_k_and_top_p[small_model]"
        ],
    ),
    Fault(
        "all nodes throw the same acceptance coin",
        [
            Edit(ACCEPT, "streams.uniform(depth, Purpose.ACCEPT, salt=n)", "streams.uniform(0, Purpose.ACCEPT)"),
            Edit(FAST, "uniform(n, Purpose.ACCEPT, salt=n)", "uniform(0 * n, Purpose.ACCEPT)"),
        ],
        [f"{CONTRACTS}test_acceptance_rule.py::test_every_tree_keeps_the_distribution"],
    ),
    Fault(
        "a later confidence decides about an earlier token: a policy cuts by the least of all",
        [
            Edit(
                POLICY,
                "confidence.cumprod(-1) >= self.min_confidence",
                "confidence.amin(-1, True).expand_as(confidence) >= self.min_confidence",
            )
        ],
        [f"{CONTRACTS}test_acceptance_rule.py::test_the_same_confidences_with_a_stopping_rule_are_exact"],
    ),
    Fault(
        "a sampled token that the target can't emit is pruned instead of kept as the last of its branch",
        [Edit(PREFIX, "if stays or not (q is None or is_one_hot(q[b, n], draft.tokens[b, n]))", "if stays")],
        ["tests/sampling/test_grammar.py::test_a_pruned_draft_keeps_the_distribution_exactly"],
    ),
    Fault(
        "the position id of a drafted node is one off",
        [Edit(DRAFT, "[[0, *(depth + 1 for depth in own)]", "[[0, *(depth + 2 for depth in own)]")],
        ["tests/decoding/test_draft.py"],
    ),
    Fault(
        "a slot that was cut inside a block keeps its last token in the cache",
        [Edit(LOOP, "path if following >= 0 else path[:-1] for path, following", "path for path, following")],
        ["tests/decoding/test_generate.py"],
    ),
    Fault(
        "a slot given to a new request keeps a drafter's memory of the old one",
        [Edit(MEMORY, "        memory.kv_cache.free(rows)\n", "")],
        ["tests/nn/test_recurrent.py::test_a_slot_used_again_drafts_as_a_new_one"],
    ),
    Fault(
        "a draft's id outside the vocabulary is not counted as a rejection",
        [Edit(ACCEPT, "went = tested & known[:, n] & passed", "went = tested & passed")],
        ["tests/decoding/test_accept.py"],
    ),
    Fault(
        "the bonus token comes from the wrong row",
        [
            Edit(ACCEPT, "went[:, None], p[:, n + 1], left", "went[:, None], p[:, n], left"),
            Edit(FAST, "following.append(wanted[at + 1])", "following.append(wanted[max(at, 0)])"),
            Edit(FAST, "left = self.p[slots, counts]", "left = self.p[slots, (counts - 1).clamp(min=0)]"),
        ],
        [f"{ENUMERATED}[chain-replacement]", f"{ENUMERATED}[long-without]"],
    ),
    Fault(
        "penalties ignore the tokens drafted before a node on its path",
        [Edit(PREFIX, "for token, more in Counter(path).items()", "for token, more in Counter(path[:0]).items()")],
        ["tests/sampling/test_prefix.py::test_every_row_is_what_it_is_by_hand"],
    ),
    Fault(
        "a grammar's state is not advanced by committed tokens",
        [Edit(PREFIX, "self.automaton.push(tokens)", "pass")],
        ["tests/sampling/test_grammar.py::test_texts_of_a_grammar_keep_the_distribution"],
    ),
    Fault(
        "a stop string that spans two steps is missed",
        [Edit(TEXT, "len(self._held) - max((len(begin) for begin", "len(self._held) - 0 * max((len(begin) for begin")],
        ["tests/sampling/test_text.py"],
    ),
    Fault(
        "an end token inside an accepted block does not end the text there",
        [Edit(STATE, "if token in self.ends), None)", "if token in self.ends and i == count - 1), None)")],
        ["tests/decoding/test_state.py"],
    ),
    Fault(
        "the greedy path accepts a node whose parent was rejected",
        [Edit(FAST, "if parents[n] == at and tokens[n] == wanted[at + 1]:", "if tokens[n] == wanted[parents[n] + 1]:")],
        ["tests/decoding/test_accept.py"],
    ),
    Fault(
        "min_new_tokens counts from the beginning of the prompt",
        [Edit(PREFIX, "if len(self.tokens) - self.start + len(path) <", "if len(self.tokens) + len(path) <")],
        ["tests/sampling/test_prefix.py::test_every_row_is_what_it_is_by_hand"],
    ),
    Fault(
        "confu remembers the soft prompt's state for the contemplate token's",
        [Edit("outrider/drafters/confu.py", "[-1] * each + each - 1 for", "[-1] * each for")],
        ["tests/drafters/test_confu.py::test_training_reads_the_future_that_serving_sees"],
    ),
    Fault(
        "a probe behind a text in training sees keys that saw another text",
        [Edit("outrider/targets/transformers.py", "(texts.mT == texts)", "(texts.mT >= texts)")],
        ["tests/drafters/test_confu.py::test_no_future_sees_another_text_or_a_later_token"],
    ),
    Fault(
        "a stage's cache is not rolled back after a rejection",
        [Edit("outrider/targets/stages.py", "        self.kv_cache.lengths[0] = start  #", "        #")],
        ["tests/decoding/test_pipelined.py::test_every_text_is_the_targets_own"],
    ),
    Fault(
        "every stage reads from the position of the oldest token in flight",
        [Edit("outrider/decoding/pipeline.py", "own.states, anchor_at + after)", "own.states, anchor_at)")],
        ["tests/decoding/test_pipelined.py::test_every_text_is_the_targets_own"],
    ),
    Fault(
        "pipeline's tokens in flight are one stage further in training",
        [Edit("outrider/drafters/pipeline.py", "stages = back + 1", "stages = back + 2")],
        ["tests/drafters/test_pipeline.py::test_training_shows_what_a_guess_sees"],
    ),
    Fault(
        "a block of tidar's masks sees the blocks before it",
        [Edit("outrider/nn/probe_rows.py", "own = of[:, None] == of", "own = of[:, None] >= of")],
        ["tests/drafters/test_tidar.py::test_masks_stand_behind_their_row_and_see_its_path_and_their_block"],
    ),
    Fault(
        "a place of jacobi_denoising's window sees the ones after it",
        [Edit("outrider/nn/probe_rows.py", "(place[:, None] >= place)", "(place[:, None] <= place)")],
        ["tests/drafters/test_jacobi_denoising.py::test_places_stand_behind_the_last_node_and_see_it_and_those_before"],
    ),
    Fault(
        "a place of jacobi_denoising's window is predicted by the row after the one before it",
        [Edit("outrider/drafters/jacobi_denoising.py", "[b, count + 1 : drafted + 1]", "[b, count + 2 : drafted + 2]")],
        ["tests/drafters/test_jacobi_denoising.py::test_a_place_loses_noise_in_every_pass_and_is_drafted_without_any"],
    ),
    Fault(
        "jacobi_denoising is trained on guesses of one place further",
        [
            Edit(
                "outrider/drafters/jacobi_denoising.py",
                "at[..., None].expand(-1, -1, states",
                "(at[..., None] + 1).expand(-1, -1, states",
            )
        ],
        ["tests/drafters/test_jacobi_denoising.py::test_windows_of_training_hold_what_the_model_guesses"],
    ),
    Fault(
        "a patch's latent is there a byte before the patch ends",
        [Edit("outrider/targets/byte_patches.py", "words, run % size == 0", "words, run % size == size - 1")],
        ["tests/targets/test_byte_model.py::test_patches_end_as_told_byte_by_byte"],
    ),
    Fault(
        "bytes that stale_latent drafts end patches, so that the global model runs for each",
        [Edit("outrider/targets/stale.py", "with byte_patches.held(), target", "with byte_patches.held(0), target")],
        ["tests/drafters/test_stale_latent.py::test_a_draft_runs_no_global_model_and_a_step_one_whole_pass"],
    ),
    Fault(
        "masks of patch_diffusion see only those before them",
        [
            Edit(
                "outrider/drafters/patch_diffusion.py",
                "torch.ones(1, width, width, dtype=torch.bool, device=device)",
                "torch.ones(1, width, width, dtype=torch.bool, device=device).tril()",
            )
        ],
        ["tests/drafters/test_patch_diffusion.py::test_serving_reads_the_rows_that_training_reads"],
    ),
    Fault(
        "rows of a block in training know the latent of patches that end among them",
        [
            Edit(
                "outrider/drafters/patch_diffusion.py", "byte_patches.held(width * at.shape[1])", "byte_patches.held(0)"
            )
        ],
        ["tests/drafters/test_patch_diffusion.py::test_serving_reads_the_rows_that_training_reads"],
    ),
    Fault(
        "a node's n-grams are of the columns before it, whatever branch they are of",
        [Edit(NGRAMS, ".where(mask, -1)", ".where(mask.long().cumsum(-1) > 0, -1)")],
        ["tests/targets/test_ngram_embedding.py::test_a_branch_of_a_tree_is_embedded_as_a_chain"],
    ),
    Fault(
        "n-grams of a target reach over an end token",
        [Edit(NGRAMS, "is_over = is_over | (before == end)", "is_over = is_over | (before == end) & False")],
        ["tests/targets/test_ngram_embedding.py::test_rows_are_those_of_whole_numbers_of_any_size"],
    ),
    Fault(
        "ngram_embedding drafts a tree's nodes after the anchor's text in place of their branch",
        [Edit("outrider/drafters/ngram_embedding.py", "[branch, before], -1", "[branch[..., :1], before], -1")],
        ["tests/drafters/test_ngram_embedding_drafter.py::test_a_trees_node_is_drafted_after_its_own_branch"],
    ),
    Fault(
        "ngram_embedding is trained on n-grams that begin in the text before",
        [Edit("outrider/drafters/ngram_embedding.py", "self.config.order, documents)", "self.config.order)")],
        ["tests/drafters/test_ngram_embedding_drafter.py::test_texts_in_one_row_do_not_know_each_other"],
    ),
]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository, which goes with the context."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        there = Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, there / part, ignore=IGNORED)
            else:
                shutil.copy2(ROOT / part, there / part)
        yield there


def plant(fault: Fault, there: Path) -> None:
    """Apply the fault's edits.  Raises SystemExit where a text does not stand exactly once in the files it is looked
    for in."""
    for path, old, new in fault.edits:
        found = {file: file.read_text().count(old) for file in sorted(there.glob(path))}
        if sum(found.values()) != 1:
            raise SystemExit(f"{fault.name}: {sum(found.values())} times in {path}, wanted once: {old!r}")
        [file] = [file for file, count in found.items() if count]
        file.write_text(file.read_text().replace(old, new))


def failed(tests: Sequence[str], there: Path, *options: str) -> tuple[list[str], str]:
    """Node ids of the tests that fail in this copy, and what pytest said.  An error outside of a test is no failure."""
    environment = os.environ | {"PYTHONPATH": str(there)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *tests,
        "-q",
        "-rf",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *options,
    ]
    limit = SECONDS * len(tests)
    try:
        run = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [], f"longer than {limit} seconds"
    names = re.findall(r"^FAILED (.*?)(?: - .*)?$", run.stdout, re.MULTILINE) if run.returncode == 1 else []
    return names, "" if run.returncode == 0 else run.stdout + run.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", type=int, choices=range(1, len(FAULTS) + 1), metavar="N", help="plant this fault alone"
    )
    only = parser.parse_args().only
    chosen = [(n, fault) for n, fault in enumerate(FAULTS, 1) if only in (None, n)]
    with copied() as there:
        where = subprocess.run(
            [sys.executable, "-c", "import outrider; print(outrider.__file__)"], cwd=there, text=True,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": str(there)},
        ).stdout  # fmt: skip
        if not Path(where.strip()).is_relative_to(there):
            raise SystemExit(f"the copy's tests would import {where.strip()!r}, not {there}")
        _, said = failed(sorted({test for _, fault in chosen for test in fault.tests}), there)
        if said:
            print(f"tests fail without any fault:\n{said}")
            return 2
    found = []
    for n, fault in chosen:
        began = time.perf_counter()
        with copied() as there:
            plant(fault, there)
            names, said = failed(fault.tests, there, "-x")
        verdict = f"caught by {names[0]}" if names else "NOT CAUGHT"
        print(f"{n:2} {fault.name}: {verdict} ({time.perf_counter() - began:.0f} s)", flush=True)
        if not names and said:
            print(said)
        found.append({"number": n, "name": fault.name, "caught": bool(names), "by": names[0] if names else None})
    print(json.dumps(found, indent=1))
    return 0 if all(each["caught"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
