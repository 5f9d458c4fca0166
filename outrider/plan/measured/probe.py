"""Replays requests of a log on the target with drafters, to measure acceptance on the user's own text.

Each request is decoded alone with fresh memory: anything a drafter learns from other requests is excluded, and stored
replays need not be repeated.  A draft of `NODES` tokens, the deepest that a plan considers, is made at every token of
the answer, so that one replay gives the steps of every depth.  At temperature 0 they are the steps of real decoding; at
higher temperatures each draft is judged as it would be in real decoding.  If a smaller draft is not a prefix of a
larger one, or depends on what was verified before, the request is decoded once for each of `DEPTHS`.
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
from outrider.storage import cache
from outrider.targets import catalog
from outrider.targets.gguf.files import locate
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts, sentence

log = logging.getLogger(__name__)

REQUESTS = 24
"""Default number of requests to replay."""
DEFAULT_MOST_S = 60.0
"""Maximum seconds of a replay without --probe."""
SEED = 0
FORMAT = 3
"""Version of the stored records; others are ignored."""
DEPTHS = (1, 2, 4, 7)
NODES = DEPTHS[-1]
FEWEST_FIRST = Config().min_first_ngrams
"""A text loops if a smaller share of its 8-grams than this are first occurrences, as in `outrider evaluate`."""
TRIED, STEPS = 256, 4
"""Prompt tokens and plain steps for the time estimate of a replay."""


@dataclass(frozen=True)
class Replayed:
    """One request replayed with one drafter."""

    number: int
    """Position of the request in the log."""
    category: str
    method: str
    tokens: int
    loops: bool
    """Whether its answer repeats itself, so that its acceptance is not representative."""
    drafts: tuple[Drafts, ...]
    """One entry for all depths, or one for each of `DEPTHS`."""

    def steps(self, depth: int) -> Steps:
        """The steps that decode this answer with drafts of at most `depth` tokens."""
        drafts = next((drafts for drafts in self.drafts if drafts.depth >= depth), self.drafts[-1])
        accepted, nodes, at = list[int](), list[int](), 0
        while at < len(drafts.paths):
            accepted.append(len([*takewhile(lambda node: node < depth, drafts.paths[at])]))
            nodes.append(min(depth, drafts.nodes[at]))
            at += accepted[-1] + 1
        return Steps(accepted, nodes)


class Drafts(NamedTuple):
    """Drafts of at most `depth` tokens, by the position i in the answer at which they begin."""

    depth: int
    paths: tuple[tuple[int, ...], ...]
    """[i]: accepted nodes, from the anchor down."""
    nodes: tuple[int, ...]
    """[i]: number of drafted tokens on all branches."""


class Steps(NamedTuple):
    accepted: list[int]
    """[step], like `nodes`."""
    nodes: list[int]


class OneByOne(SamplingJudge):
    """Judges whole drafts but commits only one token, so that a draft begins at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[tuple[int, ...]] = []
        """Nodes that would have been accepted, by step."""
        self.shapes: set[tuple[int, ...]] = set()
        """The parents of all drafts."""

    @property
    def varies(self) -> bool:
        longest = max(self.shapes, key=len, default=())
        return any(shape != longest[: len(shape)] for shape in self.shapes)

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        accepted = super().__call__(draft, scores, state)
        self.paths += map(tuple, accepted.paths)
        self.shapes |= {shape[:size] for shape, size in zip(draft.tree, draft.live, strict=True)}
        firsts = [
            int(draft.tokens[b, path[0]]) if path else token
            for b, (path, token) in enumerate(zip(accepted.paths, accepted.next_tokens, strict=True))
        ]
        return Accepted([[] for _ in firsts], firsts, accepted.invalid)


class Encoded(NamedTuple):
    """A question as token ids."""

    question: Question
    tokens: list[int]


def can_probe(candidate: Method, draft_model: str | None) -> bool:
    """Whether a method drafts without training: it is a lookup, is already trained, or is a whole model."""
    kind = method(candidate.kind)
    return kind.cost == "lookup" or candidate.name not in kinds() or (kind.is_model and bool(draft_model))


def drafter_of(subject: Subject, name: str, target: TransformersTarget, draft_model: str | None) -> Drafter:
    """The drafter of a method.  draft_model: the language model of small_model."""
    is_model = subject.methods[name].kind == name and method(name).is_model and draft_model is not None
    return load_drafter(name, target, **({"model": draft_model} if is_model else {}))


def encode(target: TransformersTarget, questions: Sequence[Question]) -> tuple[list[Encoded], int]:
    """Questions as token ids, truncated at the front to leave room for an answer, and the number that the target
    refuses."""
    reads: list[Encoded] = []
    refused, cuts = 0, Cuts()
    has_template = getattr(target.tokenizer, "chat_template", None) is not None
    for question in questions:
        prompt: Any = question.prompt
        if not isinstance(prompt, str) and not has_template:
            prompt = "".join(message["content"] for message in prompt)
        try:
            tokens = target.encode(prompt, tools=question.tools)
        except DataError:
            refused += 1
            continue
        room = target.spec.context - question.new_tokens - NODES - 1
        reads.append(Encoded(question, cuts.fit(tokens, room, f"call {len(reads)}")))
    if cuts.lost:
        log.warning("%s", sentence(cuts.lost))
    return reads, refused


def decodings(drafters: Iterable[Drafter]) -> int:
    """How many times each request is decoded."""
    return sum(1 if drafter.nested else len(DEPTHS) for drafter in drafters)


def seconds(target: TransformersTarget, reads: Sequence[Encoded], drafters: Iterable[Drafter]) -> list[float]:
    """Estimated seconds of each request with all drafters, from timing a prompt and a few plain steps."""
    text = [token % target.spec.vocabulary for token in range(1, min(TRIED, target.spec.context // 2))]
    runs = []
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        run = timing.run_once(target, Request(text, STEPS, Sampling()), ends=False)
        runs.append((run.first_s, time.perf_counter() - began))
    first_s, whole_s = runs[-1]
    per_token, per_step = first_s / len(text), max(whole_s - first_s, 1e-6) / (STEPS - 1)
    times = decodings(drafters)
    return [times * (len(encoded.tokens) * per_token + encoded.question.new_tokens * per_step) for encoded in reads]


def replay(
    target: TransformersTarget, drafters: Mapping[str, Drafter], reads: Sequence[Encoded], cached: CachedRecords,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Replayed]:  # fmt: skip
    """Decode every request with every drafter, by method name, unless `cached` has the record."""
    records, done = [], 0
    for encoded in reads:
        for name, drafter in drafters.items():
            key = cached.key(name, encoded)
            record = cached.records.get(key)
            if record is None:
                record = replay_one(target, name, drafter, encoded)
                cached.add(key, record)
            records.append(
                replace(record, number=encoded.question.number, category=encoded.question.category, method=name)
            )
            done += 1
            progress(done)
    return records


def replay_one(target: TransformersTarget, name: str, drafter: Drafter, encoded: Encoded) -> Replayed:
    """Decode one request with one drafter."""
    question, judge = encoded.question, OneByOne()
    if drafter.nested:
        run = _decode(target, drafter, encoded, NODES, judge)
        drafts = [Drafts(NODES, tuple(judge.paths), tuple(run.nodes or run.reached))]
    if not drafter.nested or judge.varies:
        runs = {depth: _decode(target, drafter, encoded, depth) for depth in DEPTHS}
        drafts, run = [_of_steps(depth, each) for depth, each in runs.items()], runs[NODES]
    loops = first_ngram_share(run.tokens) < FEWEST_FIRST
    return Replayed(question.number, question.category, name, len(run.tokens), loops, tuple(drafts))


def _decode(
    target: TransformersTarget, drafter: Drafter, encoded: Encoded, depth: int, judge: OneByOne | None = None
) -> Run:  # fmt: skip
    tenant = f"request {encoded.question.number}"
    request = Request(
        encoded.tokens, encoded.question.new_tokens, encoded.question.sampling, tenant=tenant, max_draft=depth
    )
    return timing.run_once(
        target, request, drafter, named.policy("fixed", drafter), judge=judge, shared_noise=False
    )  # fmt: skip


def _of_steps(depth: int, run: Run) -> Drafts:
    """From the steps of a run; positions inside a step count as drafts without accepted tokens."""
    made = [*zip(run.accepted, run.nodes or run.reached, strict=True)]
    paths = (path for count, _ in made for path in (tuple(range(count)), *[()] * count))
    return Drafts(depth, tuple(paths), tuple(size for count, size in made for _ in range(count + 1)))


# ── storage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class CachedRecords:
    """Stored counts of replayed requests, one file per target.  It holds hashes of texts, but no text."""

    def __init__(self, target: TransformersTarget, methods: Mapping[str, Method], draft_model: str | None = None):
        spec = target.spec
        self.target = f"{spec.name} {spec.weights_hash} {spec.precision} {version('outrider')} {FORMAT}"
        self.identities = {name: _identity(each, draft_model) for name, each in methods.items()}
        stem = hashlib.sha256(self.target.encode()).hexdigest()[:16]
        self.path = timings.folder() / "probes" / f"{stem}.jsonl"
        self.records: dict[str, Replayed] = {}
        with suppress(OSError):
            for line in cache.read(self.path).decode(errors="replace").splitlines():
                with suppress(ValueError, TypeError, KeyError):  # a line cut off by a crash
                    row = json.loads(line)
                    key, drafts = row.pop("key"), row.pop("drafts")
                    made = (Drafts(depth, tuple(map(tuple, paths)), tuple(nodes)) for depth, paths, nodes in drafts)
                    self.records[key] = Replayed(**row, drafts=tuple(made))

    def key(self, method: str, encoded: Encoded) -> str:
        """Hash of everything that the counts of one request with one method depend on."""
        about = [
            self.target,
            self.identities[method],
            encoded.tokens,
            encoded.question.new_tokens,
            asdict(encoded.question.sampling),
        ]
        return hashlib.sha256(repr(about).encode()).hexdigest()[:24]

    def add(self, key: str, record: Replayed) -> None:
        """Store a record immediately.  If the folder is not writable, the next plan replays it again."""
        self.records[key] = record
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(record)}) + "\n")


def _identity(candidate: Method, draft_model: str | None) -> str:
    """What a method's drafts depend on, including its weights."""
    if candidate.name in kinds():
        return f"{timings.identity_of(candidate.name)} {draft_model if method(candidate.kind).is_model else ''}"
    folder = describe(candidate.name).folder
    files = sorted(path for path in ([folder] if folder.is_file() else folder.iterdir()) if path.is_file())
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


# ── how many requests ─────────────────────────────────────────────────────────────────────────────────────────────────


class Share(NamedTuple):
    """The requests of a sample to replay."""

    reads: list[Encoded]
    seconds: float
    """Estimate for the whole sample."""
    before: int
    """Number of requests whose records are already stored."""
    because: str | None
    """Why not all of the sample is replayed; None if it is."""


def num_requests(requested: int | None) -> int:
    """Number of requests to draw."""
    return REQUESTS if requested is None else requested


def limited(
    target: TransformersTarget, reads: list[Encoded], cached: CachedRecords, drafters: Mapping[str, Drafter],
    requested: int | None,
) -> Share:  # fmt: skip
    """All requests if a number was given (`requested`), otherwise as many as fit into `DEFAULT_MOST_S`."""
    left = [0.0 if all(cached.key(name, encoded) in cached.records for name in drafters) else each
            for encoded, each in zip(reads, seconds(target, reads, drafters.values()), strict=True)]  # fmt: skip
    whole, before = sum(left), left.count(0.0)
    if requested is not None or whole <= DEFAULT_MOST_S:
        return Share(reads, whole, before, None)
    taken = sum(so_far <= DEFAULT_MOST_S for so_far in accumulate(left))
    why = f"all {len(reads)} would take {max(1, round(whole / 60))} min; --probe {len(reads)} replays them"
    return Share(reads[:taken], whole, before, why)


def why_not(subject: Subject, sample: Sample, names: Sequence[str], requested: int | None) -> str | None:
    """Why nothing is replayed, or None.  names: methods that draft without training."""
    if not sample.questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sample.left_out.items())
        return f"no request in the log has text ({reasons}), so acceptance can't be measured"
    if not names:
        return f"{', '.join(subject.methods)} must be trained first; add --method ngram to replay with a lookup"
    if requested is None:
        why = missing(subject.target, subject.model)
        return why and f"{why}; --probe {REQUESTS} loads it anyway"
    if Path(subject.target).expanduser().is_dir() and not has_weights(subject.target):
        return f"{subject.target} has a config but no weights"
    return None


# ── whether the target is loaded ──────────────────────────────────────────────────────────────────────────────────────


def missing(name: str, model: Anatomy) -> str | None:
    """Why a target is not loaded without --probe: its weights are not on this machine, or take most of its memory.
    None if it can be loaded."""
    if not has_weights(name):
        return f"no weights of {name} are on this machine"
    free, needed = machine.free_memory(), 4.0 * model.parameters  # a CPU computes in float32
    if locate(catalog.checkpoint(name)) is not None:
        needed = model.weight_bytes
    if torch.cuda.is_available():
        free, needed = machine.free_memory("cuda"), model.weight_bytes
    if needed > free / 2:
        return f"the weights of {name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here"
    return None


def has_weights(name: str) -> bool:
    """Whether a target's weights are available: a known name, a folder with weights, or an id already downloaded."""
    if name in catalog.NAMES or locate(name) is not None:
        return True
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(str(cached_file(name, "config.json", local_files_only=True))).parent
        except (OSError, ValueError):
            return False
    return any(any(folder.glob(ending)) for ending in ("*.safetensors", "*.bin", "ensemble.json"))
