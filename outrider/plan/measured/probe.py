"""Requests of a log, replayed on the target with drafters, so that acceptance is that of the user's own text.

Each request is decoded alone, with a memory of its own: what a drafter learns from other requests is not counted, and
what was replayed before need not be replayed again.  A draft of `NODES` tokens, the most that a plan looks at, is made
at every token of the answer, so that steps of every depth follow from one replay.  At temperature 0 they are the steps
that decoding makes; above it each draft is judged as it would be there.  Where a draft of fewer tokens is not the
beginning of a larger one, or hangs on what was verified before, the request is decoded once for each of `DEPTHS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import cached_file

from outrider import machine
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.drafters import kinds, method
from outrider.errors import DataError
from outrider.loading import describe, load_drafter
from outrider.measure import timing
from outrider.measure.config import Config
from outrider.measure.record import Run
from outrider.measure.tasks.prompts import first_ngram_share
from outrider.plan.measured import timings
from outrider.plan.measured.sample import Question, Sample
from outrider.plan.paper.anatomy import Anatomy
from outrider.plan.subject import Method, Subject
from outrider.policies import named
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets import catalog
from outrider.targets.gguf.files import locate
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts, sentence

log = logging.getLogger(__name__)

REQUESTS = 24
"""Replayed unless a number was given."""
UNASKED_S = 60.0
"""Most seconds of a replay that nobody asked for."""
SEED = 0
FORMAT = 3
"""Of what is stored; another counts as not replayed."""
DEPTHS = (1, 2, 4, 7)
NODES = DEPTHS[-1]
FEWEST_FIRST = Config().min_first_ngrams
"""A text loops where a smaller share of its 8-grams are there for the first time, as in `outrider evaluate`."""
TRIED, STEPS = 256, 4
"""Tokens of the prompt and plain steps from which the time of a replay is estimated."""


@dataclass(frozen=True)
class Replayed:
    """One request under one drafter."""

    number: int
    """Of the request in the log."""
    category: str
    method: str
    tokens: int
    loops: bool
    """Its answer repeats itself, so that drafts of it say nothing of other text."""
    drafts: tuple[Drafts, ...]
    """One for all depths, or one for each of `DEPTHS`."""

    def steps(self, depth: int) -> Steps:
        """The steps that decode this answer with drafts of at most so many tokens, the first ones of each draft."""
        own = next((drafts for drafts in self.drafts if drafts.depth >= depth), self.drafts[-1])
        accepted, nodes, at = list[int](), list[int](), 0
        while at < len(own.paths):
            accepted.append(len([*takewhile(lambda node: node < depth, own.paths[at])]))
            nodes.append(min(depth, own.nodes[at]))
            at += accepted[-1] + 1
        return Steps(accepted, nodes)


class Drafts(NamedTuple):
    """Drafts of at most `depth` tokens, by the token i of the answer that they begin at."""

    depth: int
    paths: tuple[tuple[int, ...], ...]
    """[i]: nodes that are accepted, from the anchor down."""
    nodes: tuple[int, ...]
    """[i]: tokens that are drafted, on all branches."""


class Steps(NamedTuple):
    accepted: list[int]
    """By step, as are `nodes`."""
    nodes: list[int]


class OneByOne(SamplingJudge):
    """Judges whole drafts and commits the first token alone, so that a draft begins at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[tuple[int, ...]] = []
        """Nodes that would have been accepted at each."""
        self.shapes: set[tuple[int, ...]] = set()
        """Parents of each draft's nodes."""

    @property
    def varies(self) -> bool:
        longest = max(self.shapes, key=len, default=())
        return any(shape != longest[: len(shape)] for shape in self.shapes)

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        found = super().__call__(draft, scores, state)
        self.paths += map(tuple, found.paths)
        self.shapes |= {shape[:size] for shape, size in zip(draft.tree, draft.live, strict=True)}
        firsts = [
            int(draft.tokens[b, path[0]]) if path else token
            for b, (path, token) in enumerate(zip(found.paths, found.next_tokens, strict=True))
        ]
        return Accepted([[] for _ in firsts], firsts, found.invalid)


class Read(NamedTuple):
    """A question as the target reads it."""

    question: Question
    tokens: list[int]


def can_probe(own: Method, draft_model: str | None) -> bool:
    """Whether a method drafts without a training: it looks drafts up, was trained before, or is a whole model."""
    own_kind = method(own.kind)
    return own_kind.cost == "lookup" or own.name not in kinds() or (own_kind.is_model and bool(draft_model))


def drafter_of(own: Subject, name: str, target: TransformersTarget, draft_model: str | None) -> Drafter:
    """The drafter of a method.  draft_model: the language model of small_model."""
    is_model = own.methods[name].kind == name and method(name).is_model and draft_model is not None
    return load_drafter(name, target, **({"model": draft_model} if is_model else {}))


def read(target: TransformersTarget, questions: Sequence[Question]) -> tuple[list[Read], int]:
    """Questions as token ids, cut at the front to leave room for an answer; and how many the target refuses."""
    found: list[Read] = []
    refused, cuts = 0, Cuts()
    has_template = getattr(target.tokenizer, "chat_template", None) is not None
    for question in questions:
        prompt: Any = question.prompt
        if not isinstance(prompt, str) and not has_template:
            prompt = "\n".join(message["content"] for message in prompt)
        try:
            tokens = target.encode(prompt)
        except DataError:
            refused += 1
            continue
        room = target.spec.context - question.new_tokens - NODES - 1
        found.append(Read(question, cuts.fit(tokens, room, f"call {len(found)}")))
    if cuts.lost:
        log.warning("%s", sentence(cuts.lost))
    return found, refused


def decodings(drafters: Iterable[Drafter]) -> int:
    """Times that each request is decoded."""
    return sum(1 if drafter.nested else len(DEPTHS) for drafter in drafters)


def seconds(target: TransformersTarget, reads: Sequence[Read], drafters: Iterable[Drafter]) -> list[float]:
    """About how long each request takes with all drafters, from a prompt and a few plain steps timed now."""
    text = [token % target.spec.vocabulary for token in range(1, min(TRIED, target.spec.context // 2))]
    runs = []
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        run = timing.run_once(target, Request(text, STEPS, Sampling()), ends=False)
        runs.append((run.first_s, time.perf_counter() - began))
    first_s, whole_s = runs[-1]
    per_token, per_step = first_s / len(text), max(whole_s - first_s, 1e-6) / (STEPS - 1)
    times = decodings(drafters)
    return [times * (len(own.tokens) * per_token + own.question.new_tokens * per_step) for own in reads]


def replay(
    target: TransformersTarget, drafters: Mapping[str, Drafter], reads: Sequence[Read], cached: CachedRecords,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Replayed]:  # fmt: skip
    """Decode every request with every drafter, by the names of methods.  What `cached` has is not decoded again."""
    found, done = [], 0
    for own in reads:
        for name, drafter in drafters.items():
            key = cached.key(name, own)
            record = cached.records.get(key)
            if record is None:
                record = replay_one(target, name, drafter, own)
                cached.add(key, record)
            found.append(replace(record, number=own.question.number, category=own.question.category, method=name))
            done += 1
            progress(done)
    return found


def replay_one(target: TransformersTarget, name: str, drafter: Drafter, own: Read) -> Replayed:
    """Decode one request with one drafter."""
    question, judge = own.question, OneByOne()
    if drafter.nested:
        run = _decode(target, drafter, own, NODES, judge)
        drafts = [Drafts(NODES, tuple(judge.paths), tuple(run.nodes or run.reached))]
    if not drafter.nested or judge.varies:
        runs = {depth: _decode(target, drafter, own, depth) for depth in DEPTHS}
        drafts, run = [_of_steps(depth, each) for depth, each in runs.items()], runs[NODES]
    loops = first_ngram_share(run.tokens) < FEWEST_FIRST
    return Replayed(question.number, question.category, name, len(run.tokens), loops, tuple(drafts))


def _decode(
    target: TransformersTarget, drafter: Drafter, own: Read, depth: int, judge: OneByOne | None = None
) -> Run:  # fmt: skip
    tenant = f"request {own.question.number}"
    request = Request(own.tokens, own.question.new_tokens, own.question.sampling, tenant=tenant, max_draft=depth)
    return timing.run_once(
        target, request, drafter, named.policy("fixed", drafter), judge=judge, shared_noise=False
    )  # fmt: skip


def _of_steps(depth: int, run: Run) -> Drafts:
    """Of the drafts that were made; one that would begin at a token between them has nothing accepted."""
    made = [*zip(run.accepted, run.nodes or run.reached, strict=True)]
    paths = (path for count, _ in made for path in (tuple(range(count)), *[()] * count))
    return Drafts(depth, tuple(paths), tuple(size for count, size in made for _ in range(count + 1)))


# ── kept ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CachedRecords:
    """Counts of what was replayed, in a file of this target's.  No text is in it, but hashes of texts are."""

    def __init__(self, target: TransformersTarget, methods: Mapping[str, Method], draft_model: str | None = None):
        spec = target.spec
        self.target = f"{spec.name} {spec.weights_hash} {spec.precision} {version('outrider')} {FORMAT}"
        self.identities = {name: _identity(own, draft_model) for name, own in methods.items()}
        stem = hashlib.sha256(self.target.encode()).hexdigest()[:16]
        self.path = timings.folder() / "probes" / f"{stem}.jsonl"
        self.records: dict[str, Replayed] = {}
        with suppress(OSError):
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, TypeError, KeyError):  # a line that a crash cut off
                    row = json.loads(line)
                    key, drafts = row.pop("key"), row.pop("drafts")
                    made = (Drafts(depth, tuple(map(tuple, paths)), tuple(nodes)) for depth, paths, nodes in drafts)
                    self.records[key] = Replayed(**row, drafts=tuple(made))

    def key(self, method: str, own: Read) -> str:
        """Of one request under one method: everything that its counts depend on."""
        about = [
            self.target,
            self.identities[method],
            own.tokens,
            own.question.new_tokens,
            asdict(own.question.sampling),
        ]
        return hashlib.sha256(repr(about).encode()).hexdigest()[:24]

    def add(self, key: str, record: Replayed) -> None:
        """Store a record at once; where nothing can be written the next plan replays it again."""
        self.records[key] = record
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(record)}) + "\n")


def _identity(own: Method, draft_model: str | None) -> str:
    """What a method drafts depends on, its weights included."""
    if own.name in kinds():
        return f"{timings.identity_of(own.name)} {draft_model if method(own.kind).is_model else ''}"
    folder = describe(own.name).folder
    files = sorted(path for path in ([folder] if folder.is_file() else folder.iterdir()) if path.is_file())
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


# ── how much of it ────────────────────────────────────────────────────────────────────────────────────────────────────


class Share(NamedTuple):
    """The requests of a sample that are replayed."""

    reads: list[Read]
    seconds: float
    """That all of the sample would take."""
    before: int
    """Of the sample, that were replayed before and take no time."""
    because: str | None
    """Why not all of it is replayed; None where it is."""


def wanted(asked: int | None) -> int:
    """Requests that are drawn."""
    return REQUESTS if asked is None else asked


def within(
    target: TransformersTarget, reads: list[Read], cached: CachedRecords, drafters: Mapping[str, Drafter],
    asked: int | None,
) -> Share:  # fmt: skip
    """As many requests as were asked for, or so few that they take `UNASKED_S` at most.

    asked: None where nobody gave a number.
    """
    left = [0.0 if all(cached.key(name, own) in cached.records for name in drafters) else each
            for own, each in zip(reads, seconds(target, reads, drafters.values()), strict=True)]  # fmt: skip
    whole, before = sum(left), left.count(0.0)
    if asked is not None or whole <= UNASKED_S:
        return Share(reads, whole, before, None)
    taken = sum(so_far <= UNASKED_S for so_far in accumulate(left))
    why = f"all {len(reads)} would take {max(1, round(whole / 60))} min; --probe {len(reads)} replays them"
    return Share(reads[:taken], whole, before, why)


def why_not(own: Subject, sample: Sample, names: Sequence[str], asked: int | None) -> str | None:
    """Why nothing is replayed; None where something is.  names: methods that draft without a training."""
    if not sample.questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sample.left_out.items())
        return f"no request in the log has a text ({reasons}), so its acceptance can't be measured"
    if not names:
        return f"{', '.join(own.methods)} must be trained first; add --method ngram to replay with a lookup"
    if asked is None:
        why = missing(own.target, own.model)
        return why and f"{why}; --probe {REQUESTS} loads it all the same"
    if Path(own.target).expanduser().is_dir() and not has_weights(own.target):
        return f"{own.target} has a config and no weights"
    return None


# ── whether it can be ─────────────────────────────────────────────────────────────────────────────────────────────────


def missing(name: str, model: Anatomy) -> str | None:
    """Why a target is not loaded unasked: its weights are not on this machine, or take most of its memory.  None where
    it can be loaded."""
    if not has_weights(name):
        return f"no weights of {name} are on this machine"
    free, wanted = machine.free_memory(), 4.0 * model.parameters  # a CPU computes in float32
    if locate(catalog.checkpoint(name)) is not None:
        wanted = model.weight_bytes
    if torch.cuda.is_available():
        free, wanted = machine.free_memory("cuda"), model.weight_bytes
    if wanted > free / 2:
        return f"the weights of {name} take {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here"
    return None


def has_weights(name: str) -> bool:
    """Whether a target's weights can be read: a known name, a folder, or an id that was fetched before."""
    if name in catalog.NAMES or locate(name) is not None:
        return True
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(str(cached_file(name, "config.json", local_files_only=True))).parent
        except (OSError, ValueError):
            return False
    return any(any(folder.glob(ending)) for ending in ("*.safetensors", "*.bin", "ensemble.json"))
