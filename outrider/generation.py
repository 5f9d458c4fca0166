"""Continue prompts with a target and a drafter, at once (`generate`) or step by step (`stream`).

Continuous batching: when a text ends, its slot goes to the next prompt while the other texts continue.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider import machine
from outrider.costs.stored import StoredCosts, cost_key
from outrider.decoding.loop import StepRunner
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.scheduler import Progress, advance, draft_columns
from outrider.decoding.state import DecodeState, FinishReason, Request
from outrider.errors import ConfigError, DataError, DrafterError
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.runner import runner_of
from outrider.kernels.selection import acceptance_kernels
from outrider.loading import load_drafter
from outrider.machine import measurements
from outrider.policies import named
from outrider.sampling.grammar import Grammar
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.logprobs import TokenLogprob
from outrider.sampling.settings import Sampling, whole
from outrider.sampling.text import with_stops
from outrider.targets.cache.capacity import capacity
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import Target, TargetSpec
from outrider.targets.text.prompts import Prompt, is_chat, listed

T = TypeVar("T", bound=Target)
R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Generation:
    """One prompt's continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    """Target passes after the prefill."""
    accepted: list[int] = field(default_factory=list)
    """Accepted draft tokens of each step."""
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] | None = None
    """One per token, if `Sampling.logprobs` is set."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one prompt; unpacks into prompt, tokens, text and drafted."""

    prompt: int
    tokens: list[int]
    text: str
    drafted: int
    """Number of leading tokens that were drafted; the rest came from the target."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if `Sampling.logprobs` is set."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.prompt, self.tokens, self.text, self.drafted))


DrafterLike = Drafter | str | Path
"""A drafter, a kind such as `ngram`, or the folder or Hugging Face id of a trained one."""


def generate(
    target: Target | str | Path, prompts: Prompt | Iterable[Prompt], drafter: DrafterLike | None = None, *,
    max_new_tokens: int, temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
    seed: int | None = None, sampling: Sampling | None = None, policy: str | Policy | None = None,
    verification: str | SamplingJudge = "standard", allow_lossy: bool = False, stop: Sequence[str] = (),
    slots: int = 16, memory_gb: float | None = None, shared_noise: bool = True, halves: bool = False,
) -> list[Generation]:  # fmt: skip
    """Continue every prompt; the text is what the target alone would have generated, unless a lossy verification is
    chosen.

    target, drafter: a name or a folder is loaded as by `load_target` and `load_drafter` in every call; load them
    yourself for several calls.
    prompts: one or many of text, token ids (a list, a tensor [S] or [B, S], or a tokenizer's output, whose padding is
    dropped), or chat messages.
    A stop string ends `text` before itself and `tokens` at the token that completed it.  At most `slots` prompts share
    the batch; the others wait.
    temperature, top_p, top_k, seed: as in `Sampling`, which has more settings; give these or `sampling`.
    sampling: by default the model's generation_config, which is usually greedy; a given one replaces all of it except
    the end tokens.
    policy: how much is drafted: `auto`, the default, drafts as much as pays off according to measured step times, and
    nothing if plain steps are faster; `fixed`, everything the drafter offers; or a policy of your own.
    verification: `standard`; `block`, which accepts more of a sampled chain and is exact too; or, only with
    allow_lossy=True, `typical`, `relaxed` (see `policies.lossy`), `relay`, `scorer` or `counterfactual`, which need
    settings, such as `relay(cues=cues.json)`.  The judge of `policies.named.judge(name)` has the `distance` of lossy
    texts from the target's distribution, and `figures` of its gain.
    memory_gb: memory limit of the KV cache, in GB.  Prompts wait until they fit; on a GPU all slots must fit.  A prompt
    that can never fit is refused before anything is computed.
    shared_noise: a seed fixes the text, whatever the drafter; False accepts more of a sampled draft, and a seed then
    fixes only the noise, as it does with `block` and lossy verification.
    halves: verify half of the prompts while the other half is drafted, for a drafter on a separate device; each half
    has half of the slots, its own thread and, on a GPU, its own stream.  The texts are the same.
    Raises DataError for a prompt that is empty or does not fit the context, ConfigError for a stop string that can
    never match, before anything is computed.
    """
    judge = named.judge(verification, allow_lossy)
    sampling = _sampling(sampling, temperature, top_p, top_k, seed)
    target = as_target(target)
    batch = requests(target, prompts, max_new_tokens, sampling, stop, streamed=False)
    drafter = Drafter() if drafter is None else as_drafter(drafter, target)
    parts = [(batch, judge)]
    if halves:
        _refuse_halves(target, policy, verification)
        parts = [(batch[::2], judge), (batch[1::2], named.judge(verification, allow_lossy))]
        slots = max(1, whole("slots", slots) // 2)
        memory_gb = None if memory_gb is None else memory_gb / 2
    served = [
        serve(
            target, part, drafter, policy=policy, judge=judge_of_part, slots=slots, memory_gb=memory_gb,
            shared_noise=shared_noise,
        )
        for part, judge_of_part in parts
    ]  # fmt: skip
    jobs = [functools.partial(_generations, part, steps) for (part, _), steps in zip(parts, served, strict=True)]
    if not halves:
        return jobs[0]()
    generations = _in_parallel(jobs, target.device)
    return [generations[i % 2][i // 2] for i in range(len(batch))]


def _generations(requests: Sequence[Request], served: Iterable[Progress]) -> list[Generation]:
    """Run all steps and collect their output."""
    generations = [Generation(logprobs=None if request.sampling.logprobs is None else []) for request in requests]
    for progress in served:
        generation = generations[progress.request]
        generation.tokens += progress.tokens
        generation.text += progress.text
        generation.steps += 1
        generation.accepted.append(progress.accepted)
        generation.finish_reason = progress.finish_reason or "length"
        if generation.logprobs is not None:
            generation.logprobs += progress.logprobs
    return generations


def _refuse_halves(target: Target, policy: object, verification: object) -> None:
    """Raises ConfigError for arguments that two threads can't share."""
    if not isinstance(policy, str | None) or not isinstance(verification, str):
        raise ConfigError("halves need policy and verification by name, since each half has its own; give names")
    if isinstance(getattr(getattr(target, "step", None), "graph", None), CudaGraphs):
        raise ConfigError("halves can't share CUDA graphs, which run one at a time; load the target with compile=False")


def _in_parallel(jobs: Sequence[Callable[[], R]], device: torch.device) -> list[R]:
    """Run each job in its own thread, and on a GPU in its own stream."""

    def run(job: Callable[[], R]) -> R:
        if device.type != "cuda":
            return job()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            return job()

    with ThreadPoolExecutor(len(jobs), "outrider-half") as threads:
        return list(threads.map(run, jobs))


def stream(
    target: Target | str | Path, prompts: Prompt | Iterable[Prompt], drafter: DrafterLike | None = None, *,
    max_new_tokens: int, temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
    seed: int | None = None, sampling: Sampling | None = None, policy: str | Policy | None = None,
    verification: str | SamplingJudge = "standard", allow_lossy: bool = False, stop: Sequence[str] = (),
    slots: int = 16, memory_gb: float | None = None, shared_noise: bool = True,
) -> Iterator[Piece]:  # fmt: skip
    """Like `generate`, but step by step: (prompt index, new tokens, new text, number of accepted draft tokens)."""
    judge = named.judge(verification, allow_lossy)
    sampling = _sampling(sampling, temperature, top_p, top_k, seed)
    target = as_target(target)
    batch = requests(target, prompts, max_new_tokens, sampling, stop)
    served = serve(
        target, batch, drafter, policy=policy, judge=judge, slots=slots, memory_gb=memory_gb,
        shared_noise=shared_noise,
    )  # fmt: skip
    return (Piece(step.request, step.tokens, step.text, step.accepted, step.logprobs) for step in served)


def serve(
    target: Target, requests: Sequence[Request], drafter: DrafterLike | None = None, *,
    policy: str | Policy | None = None,
    judge: str | SamplingJudge = "standard", slots: int = 16, memory_gb: float | None = None,
    shared_noise: bool = True, state: DecodeState | None = None,
) -> Iterator[Progress]:  # fmt: skip
    """Serve requests over slots, one step at a time.  memory_gb: as in `generate`.

    state: used with its own judge if given; it can be read between steps.
    """
    drafter = Drafter() if drafter is None else as_drafter(drafter, target)
    if state is None:
        state = batch(target, min(whole("slots", slots), max(len(requests), 1)), judge, shared_noise)
    tokens = None if memory_gb is None else _tokens_within(memory_gb, target, requests, drafter, state)

    def fast(length: int) -> StepRunner | None:
        """Caches may be longer than these texts, so that the next call can use them too."""
        longest = length if memory_gb else min(1 << (int(length) - 1).bit_length(), target.spec.context)
        return runner_of(target, drafter, state, longest).whole

    chosen = named.policy(policy, drafter, functools.partial(stored_costs, target, drafter))
    return advance(target, requests, drafter, chosen, state, tokens, fast)


def stored_costs(target: Target, drafter: Drafter) -> StoredCosts:
    """Step times of these two, measured on this machine in earlier processes."""
    spec = target.spec
    step = getattr(target, "step", None)
    size = spec.name, spec.layers, spec.hidden, spec.vocabulary, spec.dtype, spec.quantised
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
    about = machine.identity(), device, type(target).__qualname__, size, getattr(step, "graph", None) is not None
    return StoredCosts((*about, cost_key(drafter)), measurements.is_busy)


def _tokens_within(
    memory_gb: float, target: Target, requests: Sequence[Request], drafter: Drafter, state: DecodeState
) -> int | None:  # fmt: skip
    """Maximum number of tokens of all texts, as in `Capacity`.  Raises ConfigError if the longest request does not
    fit."""
    if not memory_gb > 0:
        raise ConfigError(f"memory_gb must be a number above 0, got {memory_gb}")
    longest = max((len(request.prompt) + request.max_new_tokens for request in requests), default=0)
    length = max(2, min(longest, state.context))
    return capacity(target, len(state.tokens), length, int(memory_gb * 1e9), draft_columns(drafter)).tokens


def batch(
    target: Target, slots: int, judge: str | SamplingJudge = "standard", shared_noise: bool = True,
    ends: frozenset[int] | None = None,
) -> DecodeState:  # fmt: skip
    """A batch of free slots for this target.  ends: tokens that end a text; by default the target's.

    Raises ConfigError for a judge that belongs to another batch.
    """
    if whole("slots", slots) < 1:
        raise ConfigError(f"slots must be at least 1, got {slots}")
    judge = named.judge(judge)
    other = judge.serves() if judge.serves is not None else None
    if other is not None and other.requests:
        raise ConfigError("this judge belongs to another batch; make one for each batch with policies.named.judge")
    judge.kernels = acceptance_kernels(target.device)
    # another acceptance rule does not share samples with plain decoding
    is_shared = shared_noise and judge.rule is None
    state = DecodeState(
        slots, target.spec.context, target.ends if ends is None else ends, target.device, judge, is_shared
    )
    judge.serves = weakref.ref(state)
    return state


def requests(
    target: Target, prompts: Any, max_new_tokens: int, sampling: Sampling | None, stop: Sequence[str] = (),
    streamed: bool = True, continues: bool | None = None,
) -> list[Request]:  # fmt: skip
    """The requests for these arguments of `generate`, checked.  Texts that are neither streamed nor searched for stop
    strings are detokenized once, at the end.

    continues: whether the answer continues the text of the prompt; by default true except for chats.
    """
    if whole("max_new_tokens", max_new_tokens) < 0:
        raise ConfigError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if sampling is not None:
        sampling = _resolved(sampling, target, max_new_tokens)
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(text, str) for text in stops):
        raise ConfigError(f"stop must be a text or a list of texts, got {stop!r}")
    if "" in stops:
        raise ConfigError("an empty stop string would end every text at once; leave it out")
    if stops:
        with_stops(target.detokenizer, stops)
    detokenizer = target.detokenizer
    if detokenizer is not None and not (streamed or stops):
        detokenizer = replace(detokenizer, is_local=False)
    requests = []
    for i, prompt in enumerate(listed(prompts)):
        tokens = target.encode(prompt)
        if len(tokens) >= (context := target.spec.context):
            raise DataError(
                f"prompt {i} has {len(tokens)} tokens and leaves no room in the target's context of {context}; "
                "shorten it"
            )
        is_continued = not is_chat(prompt) if continues is None else continues
        settings = sampling or _resolved(target.default_sampling(tokens, max_new_tokens), target, max_new_tokens)
        requests.append(Request(tokens, max_new_tokens, settings, stops, detokenizer, is_continued))
    return requests


def _resolved(sampling: Sampling, target: Target, max_new_tokens: int) -> Sampling:
    """This sampling, checked against the target, with its grammar compiled."""
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling must be a Sampling, got {sampling!r}; give one such as Sampling(temperature=0.7)")
    if sampling.min_new_tokens > max_new_tokens > 0:
        raise ConfigError(
            f"min_new_tokens {sampling.min_new_tokens} is more than max_new_tokens {max_new_tokens}; lower it"
        )
    sampling.check(target.spec.vocabulary)
    if isinstance(sampling.grammar, Grammar):
        sampling = replace(sampling, grammar=sampling.grammar.compiled(target))
    return sampling


def _sampling(
    sampling: Sampling | None, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> Sampling | None:
    """`sampling`, or one built from the separate settings."""
    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    settings = {name: value for name, value in settings.items() if value is not None}
    if not settings:
        return sampling
    names = " and ".join(settings)
    if sampling is not None:
        raise ConfigError(f"{names} and sampling are both given; set {names} in the Sampling, or leave sampling out")
    if temperature is None and (top_p, top_k) != (None, None):
        names = " and ".join(name for name in ("top_p", "top_k") if name in settings)
        raise ConfigError(f"{names} has no effect without a temperature; give temperature too, such as temperature=1.0")
    return Sampling(**settings)


def as_target(target: T | str | Path) -> T | TransformersTarget:
    """The target itself, or the one of this name, which is loaded."""
    return load_target(target) if isinstance(target, str | Path) else target


def as_drafter(drafter: DrafterLike, target: Target) -> Drafter:
    """The drafter itself, or the one of this name, which is loaded.  Raises the errors of `load_drafter`, and
    DrafterError if it does not fit."""
    if isinstance(drafter, str | Path):
        return load_drafter(drafter, target)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter must be a drafter, a kind such as 'ngram', or a folder, got {drafter!r}; see load_drafter"
        )
    _refuse_unfitting(drafter, target.spec)
    return drafter


def as_drafters(
    drafters: DrafterLike | Iterable[DrafterLike] | Mapping[str, DrafterLike], target: Target
) -> dict[str, Drafter]:
    """One or several drafters by name; the name of a kind or a folder is the kind or folder itself.  Raises the errors
    of `as_drafter`."""
    if isinstance(drafters, Mapping):
        return {str(name): as_drafter(drafter, target) for name, drafter in drafters.items()}
    unnamed = [drafters] if isinstance(drafters, DrafterLike) else list(drafters)
    for drafter in unnamed:
        if not isinstance(drafter, str | Path):
            raise ConfigError(
                f"{drafter!r} has no name for the report; give a mapping of names such as {{'mine': drafter}}"
            )
    return {str(drafter): as_drafter(drafter, target) for drafter in unnamed}


def _refuse_unfitting(drafter: Drafter, spec: TargetSpec) -> None:
    """Raises DrafterError for a drafter built for a target of another shape."""
    layers = f"{spec.name} has layers 0 to {spec.layers - 1}"
    wrong = [f"taps layer {tap}, {layers}" for tap in drafter.taps if not 0 <= tap < spec.layers]
    if drafter.hidden not in (None, spec.hidden):
        wrong.append(f"reads hidden states of size {drafter.hidden}, {spec.name}'s have {spec.hidden}")
    if wrong:
        raise DrafterError(f"the drafter {wrong[0]}, so it was built for another target; build it for this one")
