"""Continue prompts with a target and a drafter, whole (`generate`) or step by step (`stream`).

A few slots serve any number of prompts: when a text ends, its slot goes to the next prompt while the others go on.
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
Found = TypeVar("Found")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Generation:
    """One prompt's continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    """Verified steps: passes of the target after the prompt was read."""
    accepted: list[int] = field(default_factory=list)
    """Accepted drafted tokens, step by step."""
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] | None = None
    """One for each of `tokens`, where `Sampling.logprobs` asks for them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one prompt; unpacks into prompt, tokens, text and drafted."""

    prompt: int
    tokens: list[int]
    text: str
    drafted: int
    """How many of the tokens, from the first on, were drafted; the rest is the target's own."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of the tokens, where `Sampling.logprobs` asks for them."""

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
    """Continue every prompt; the text is what the target alone would have written, unless a lossy verification is asked
    for.

    target, drafter: a name or a folder is loaded as by `load_target` and `load_drafter`, in every call; load them
    yourself for more than one.
    prompts: one or many of text, token ids (a list, a tensor [S] or [B, S], or what a tokenizer returns, of which the
    padding is left out), or chat messages.
    A stop string ends `text` before itself and `tokens` at the token that completed it.  At most `slots` prompts share
    the batch, further ones wait.
    temperature, top_p, top_k, seed: as in `Sampling`, which has more settings; give these or `sampling`.
    sampling: greedy by default, as the model's own generation_config says; one that is given takes the place of all of
    that but its end tokens.
    policy: how much is drafted: `auto` unless given, as much as pays by the seconds measured, and nothing where plain
    steps are faster; `fixed`, all that the drafter offers; or one of your own.
    verification: `standard`; `block`, which accepts more of a sampled chain and is exact too; or, only with
    allow_lossy=True, `typical`, `relaxed` (see `policies.lossy`), `relay`, `scorer` or `counterfactual`, which need
    settings, such as `relay(cues=cues.json)`.  `policies.named.judge(name)` gives one whose `distance` is the distance
    of a lossy one's texts from the target's distribution, and whose `figures` say what that bought.
    memory_gb: most memory of keys and values, in GB.  Prompts wait until they fit, on a GPU all slots must; a prompt
    that never fits is refused before anything is computed.
    shared_noise: a seed fixes the text, whatever drafts for it; False accepts more of a sampled draft, and a seed then
    fixes the noise alone, as it does under `block` and the lossy ones.
    halves: decode half of the prompts while the other half is drafted for, for a drafter on a device of its own; each
    half has half of the slots, a thread, and on a GPU a stream.  The texts are the same.
    Raises DataError for a prompt that is empty or does not fit the context, ConfigError for a stop string that can
    never match, before anything is computed.
    """
    judge, sampling = named.judge(verification, allow_lossy), _sampling(sampling, temperature, top_p, top_k, seed)
    target = as_target(target)
    asked = requests(target, prompts, max_new_tokens, sampling, stop, streamed=False)
    drafter = Drafter() if drafter is None else as_drafter(drafter, target)
    parts = [(asked, judge)]
    if halves:
        _refuse_halves(target, policy, verification)
        parts = [(asked[::2], judge), (asked[1::2], named.judge(verification, allow_lossy))]
        slots, memory_gb = max(1, whole("slots", slots) // 2), None if memory_gb is None else memory_gb / 2
    served = [
        serve(
            target, own, drafter, policy=policy, judge=each, slots=slots, memory_gb=memory_gb,
            shared_noise=shared_noise,
        )
        for own, each in parts
    ]  # fmt: skip
    works = [functools.partial(_texts, own, steps) for (own, _), steps in zip(parts, served, strict=True)]
    if not halves:
        return works[0]()
    found = _abreast(works, target.device)
    return [found[i % 2][i // 2] for i in range(len(asked))]


def _texts(requests: Sequence[Request], served: Iterable[Progress]) -> list[Generation]:
    """What these steps write."""
    found = [Generation(logprobs=None if request.sampling.logprobs is None else []) for request in requests]
    for progress in served:
        generation = found[progress.request]
        generation.tokens += progress.tokens
        generation.text += progress.text
        generation.steps += 1
        generation.accepted.append(progress.accepted)
        generation.finish_reason = progress.finish_reason or "length"
        if generation.logprobs is not None:
            generation.logprobs += progress.logprobs
    return found


def _refuse_halves(target: Target, policy: object, verification: object) -> None:
    """Raises ConfigError for what two threads can't share."""
    if not isinstance(policy, str | None) or not isinstance(verification, str):
        raise ConfigError("halves need policy and verification by name, since each half has its own; give names")
    if isinstance(getattr(getattr(target, "step", None), "graph", None), CudaGraphs):
        raise ConfigError(
            "halves can't share CUDA graphs, of which one runs at a time; load the target with compile=False"
        )


def _abreast(works: Sequence[Callable[[], Found]], device: torch.device) -> list[Found]:
    """What each of these returns, each in a thread, and on a GPU a stream, of its own."""

    def run(work: Callable[[], Found]) -> Found:
        if device.type != "cuda":
            return work()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            return work()

    with ThreadPoolExecutor(len(works), "outrider-half") as threads:
        return list(threads.map(run, works))


def stream(
    target: Target | str | Path, prompts: Prompt | Iterable[Prompt], drafter: DrafterLike | None = None, *,
    max_new_tokens: int, temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
    seed: int | None = None, sampling: Sampling | None = None, policy: str | Policy | None = None,
    verification: str | SamplingJudge = "standard", allow_lossy: bool = False, stop: Sequence[str] = (),
    slots: int = 16, memory_gb: float | None = None, shared_noise: bool = True,
) -> Iterator[Piece]:  # fmt: skip
    """As `generate`, step by step: (prompt index, new tokens, new text, how many of the tokens were drafted)."""
    judge, sampling = named.judge(verification, allow_lossy), _sampling(sampling, temperature, top_p, top_k, seed)
    target = as_target(target)
    asked = requests(target, prompts, max_new_tokens, sampling, stop)
    served = serve(
        target, asked, drafter, policy=policy, judge=judge, slots=slots, memory_gb=memory_gb,
        shared_noise=shared_noise,
    )  # fmt: skip
    return (Piece(step.request, step.tokens, step.text, step.accepted, step.logprobs) for step in served)


def serve(
    target: Target, requests: Sequence[Request], drafter: DrafterLike | None = None, *,
    policy: str | Policy | None = None,
    judge: str | SamplingJudge = "standard", slots: int = 16, memory_gb: float | None = None,
    shared_noise: bool = True, state: DecodeState | None = None,
) -> Iterator[Progress]:  # fmt: skip
    """Serve requests over slots, a step at a time.  memory_gb: as in `generate`.

    `state`, where given, is used with its own judge, and can be watched between the steps.
    """
    drafter = Drafter() if drafter is None else as_drafter(drafter, target)
    if state is None:
        state = batch(target, min(whole("slots", slots), max(len(requests), 1)), judge, shared_noise)
    tokens = None if memory_gb is None else _tokens_within(memory_gb, target, requests, drafter, state)

    def fast(length: int) -> StepRunner | None:
        """Caches may be longer than these texts, so that they serve the next call too."""
        most = length if memory_gb else min(1 << (int(length) - 1).bit_length(), target.spec.context)
        return runner_of(target, drafter, state, most).whole

    chosen = named.policy(policy, drafter, functools.partial(stored_costs, target, drafter))
    return advance(target, requests, drafter, chosen, state, tokens, fast)


def stored_costs(target: Target, drafter: Drafter) -> StoredCosts:
    """What steps of these two took on this machine in earlier processes."""
    spec, step = target.spec, getattr(target, "step", None)
    size = spec.name, spec.layers, spec.hidden, spec.vocabulary, spec.dtype, spec.quantised
    place = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
    about = machine.identity(), place, type(target).__qualname__, size, getattr(step, "graph", None) is not None
    return StoredCosts((*about, cost_key(drafter)), measurements.is_busy)


def _tokens_within(
    memory_gb: float, target: Target, requests: Sequence[Request], drafter: Drafter, state: DecodeState
) -> int | None:  # fmt: skip
    """Most tokens of all texts together, as in `Capacity`.  Raises ConfigError if the longest request does not fit."""
    if not memory_gb > 0:
        raise ConfigError(f"memory_gb must be a number above 0, got {memory_gb}")
    longest = max((len(request.prompt) + request.max_new_tokens for request in requests), default=0)
    length, more = max(2, min(longest, state.context)), draft_columns(drafter)
    return capacity(target, len(state.tokens), length, int(memory_gb * 1e9), more).tokens


def batch(
    target: Target, slots: int, judge: str | SamplingJudge = "standard", shared_noise: bool = True,
    ends: frozenset[int] | None = None,
) -> DecodeState:  # fmt: skip
    """Free slots for requests to this target.  ends: tokens that end a text, the target's own unless given.

    Raises ConfigError for a judge that serves another batch.
    """
    if whole("slots", slots) < 1:
        raise ConfigError(f"slots must be at least 1, got {slots}")
    judge = named.judge(judge)
    # another acceptance rule shares no draws with plain decoding
    other = judge.serves() if judge.serves is not None else None
    if other is not None and other.requests:
        raise ConfigError("this judge belongs to another batch; make one for each batch with policies.named.judge")
    judge.kernels = acceptance_kernels(target.device)
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
    """What `generate` makes of its arguments, checked.  Texts that are not streamed, nor searched, are decoded at their
    end.

    continues: whether texts go on from their prompts'; as the prompts of a text or of ids do, and chats do not, unless
    given.
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
    found = []
    for i, prompt in enumerate(listed(prompts)):
        tokens = target.encode(prompt)
        if len(tokens) >= (most := target.spec.context):
            given = f"prompt {i} has {len(tokens)} tokens"
            raise DataError(f"{given} and leaves no room in the target's context of {most}; shorten it")
        goes_on = not is_chat(prompt) if continues is None else continues
        own = sampling or _resolved(target.default_sampling(tokens, max_new_tokens), target, max_new_tokens)
        found.append(Request(tokens, max_new_tokens, own, stops, detokenizer, goes_on))
    return found


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
    """`sampling`, or one of the settings that were given by themselves."""
    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    settings = {name: value for name, value in settings.items() if value is not None}
    if not settings:
        return sampling
    names = " and ".join(settings)
    if sampling is not None:
        raise ConfigError(f"{names} and sampling are both given; set {names} in the Sampling, or leave sampling out")
    if temperature is None and (top_p, top_k) != (None, None):
        given = " and ".join(name for name in ("top_p", "top_k") if name in settings)
        raise ConfigError(f"{given} has no effect without a temperature; give temperature too, such as temperature=1.0")
    return Sampling(**settings)


def as_target(target: T | str | Path) -> T | TransformersTarget:
    """The target itself, or the one of this name, loaded."""
    return load_target(target) if isinstance(target, str | Path) else target


def as_drafter(drafter: DrafterLike, target: Target) -> Drafter:
    """The drafter itself, or the one of this name, loaded.  Raises as `load_drafter`, DrafterError for one that can't
    fit."""
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
    """One drafter or several by name; a kind or a folder without one is called as it is given.  Raises as
    `as_drafter`."""
    if isinstance(drafters, Mapping):
        return {str(name): as_drafter(each, target) for name, each in drafters.items()}
    several = [drafters] if isinstance(drafters, DrafterLike) else list(drafters)
    for each in several:
        if not isinstance(each, str | Path):
            raise ConfigError(
                f"{each!r} has no name for the report; give a mapping of names such as {{'mine': drafter}}"
            )
    return {str(each): as_drafter(each, target) for each in several}


def _refuse_unfitting(drafter: Drafter, spec: TargetSpec) -> None:
    """Raises DrafterError for a drafter that was built for a target of another shape."""
    layers = f"{spec.name} has layers 0 to {spec.layers - 1}"
    wrong = [f"taps layer {tap}, {layers}" for tap in drafter.taps if not 0 <= tap < spec.layers]
    if drafter.hidden not in (None, spec.hidden):
        wrong.append(f"reads hidden states of {drafter.hidden} numbers, {spec.name}'s have {spec.hidden}")
    if wrong:
        raise DrafterError(f"the drafter {wrong[0]}, so it was built for another target; build it for this one")
