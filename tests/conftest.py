"""Tiny real models, and every drafter at its smallest size.  float64, one thread, nothing from the network."""

import functools
import logging
import os
import random
import re
import shutil
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

if os.environ.setdefault("OUTRIDER_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which others do too

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider import drafters
from outrider import fast as fast_paths
from outrider.decoding.protocols import Drafter
from outrider.drafters.gemma4_assistant.model import keyless_layers
from outrider.errors import ConfigError
from outrider.fast.packages import build
from outrider.nn.draft_model import Batch, DraftModel
from outrider.policies import named
from outrider.policies.fixed import Fixed
from outrider.storage import cache
from outrider.targets import catalog
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import LayerSizes, Target
from outrider.training import losses

torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
DEVICE = os.environ["OUTRIDER_TEST_DEVICE"]
"""Where the shared target of the contract suite lives: cpu or cuda."""

SMALL = {
    "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "length": 4, "rank": 8,
    "shortest": 1, "longest": 3, "depth": 4, "anchors": 16, "gru": 8,
    "min_confidence": 0.0,
}  # fmt: skip
"""Smallest sizes, for the fields that a drafter's Config has."""

SMALL_OF = {
    "eagle": {"length": 3, "ttt": 3, "noise": 0.0, "anchors": None}, "eagle3": {"length": 3, "ttt": 3, "anchors": None},
    "confu": {"length": 3, "ttt": 3, "anchors": None}, "tidar": {"block": 3, "mask_token": 3},
    "jacobi_denoising": {"window": 3}, "ngram_embedding": {"order": 6},
    "mtp": {"ttt": 4, "modules": 2, "anchors": None},
    "peagle": {"layers": 2}, "specblock": {"layers": 2, "nodes": 7, "slots": 3},
    "dflash2": {"candidates": 3, "conv_group": 4, "selector_loss": "ce"},
    "lilicorr": {"candidates": 4, "scorer_hidden": 16, "scorer_heads": 2, "factor": 8},
    "patch_diffusion": {"block": 4, "steps": 2, "mask_token": 63},
}  # fmt: skip
"""Where a kind must be larger, or has a field whose name others have too."""

OF_BYTES = ("patch_diffusion", "stale_latent")
"""Kinds that draft for a target of bytes and patches alone."""


SHAPE = LayerSizes(heads=4, kv_heads=4, head_dim=8, intermediate=32, rms_norm_eps=1e-6, rope_theta=10_000.0)
"""A small decoder layer, for what is built without a drafter's Config."""


def tiny_model(seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random Qwen3 in float64 whose greedy text does not collapse at once.  Equal seed and shape, equal weights."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.1,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    return scaled(Qwen3ForCausalLM(Qwen3Config(**(sizes | overrides))).double().eval())


def scaled(model: PreTrainedModel, by: float = 2.0) -> PreTrainedModel:
    """The model with its matrices `by` times as large, so that attention and MLP move the outcome."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight *= by
    return model


# ── which tests run, and what is said of it ──────────────────────────────────────────────────────────────────────────


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of the cases that `sampled` draws")


def pytest_configure(config: pytest.Config) -> None:
    # set before test files are imported, whose parameters are drawn then; workers of xdist are given the same options
    os.environ["OUTRIDER_TEST_SEED"] = str(config.getoption("--seed"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"sampled cases: --seed {config.getoption('--seed')}"


LLAMA_SERVER = Path(os.environ.get("LLAMA_SERVER") or ROOT / "benchmarks/engines/build/build/bin/llama-server")
"""Built by `python benchmarks/engines/build_llama.py`; tests that ask it are collected where it is."""
TRAINED = ROOT / "runs/demo-small/checkpoint"
"""Trained by `outrider run recipes/demo.yaml name=demo-small`."""
SMOLLM2 = cache.folder() / "models" / f"smollm2-q4_1-{catalog.SHA256[:8]}-{catalog.VERSION}" / Path(catalog.MEMBER).name
"""Fetched by whoever loads `smollm2:q4_1`."""
collect_ignore = [
    *([] if SMOLLM2.exists() else ["targets/test_real_gguf.py"]),
    *([] if LLAMA_SERVER.exists() else ["data/test_llama_answers.py"]),
    *([] if LLAMA_SERVER.exists() and TRAINED.exists() else ["engines/test_built_llama_server.py"]),
]

MAY_BE_MISSING = re.compile("vLLM|browser|CUDA|Python 3")
"""What a test may be skipped for; all else is installed by `make test`."""


def _skipped(config: pytest.Config) -> Counter[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(_skipped(config).items()):
        allowed = "" if MAY_BE_MISSING.search(reason) else "  <- no reason to skip a test"
        terminalreporter.write_line(f"skipped {count:4} x {reason}{allowed}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that is skipped for another reason protects nobody, so the run fails."""
    if session.exitstatus == 0 and not all(map(MAY_BE_MISSING.search, _skipped(session.config))):
        session.exitstatus = 1


def sampled(values: Iterable[Any], count: int, corners: Iterable[Any] = ()) -> list[Any]:
    """`count` of a large grid's cells, drawn by `--seed`, and the corners that have failed before."""
    values, corners = list(values), list(corners)
    rest = [value for value in values if value not in corners]
    drawn = random.Random(int(os.environ.get("OUTRIDER_TEST_SEED", "0"))).sample(rest, min(count, len(rest)))
    return [value for value in values if value in corners or value in drawn]


PAYS, SHIPPED = fast_paths.Compiled._pays, named.DEFAULT


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of this run, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled packages and libraries of the tests, made once for all workers: the user's own are neither read nor
    added to, but for the kernels, which are named after their source and take a minute to compile."""
    kernels = sorted((cache.folder() / "compiled").glob("kernels-*.so"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(of_all_workers(tmp_path_factory) / "cache"))
        for built in kernels:
            with cache.keeping(cache.folder() / "compiled" / built.name) as part:
                shutil.copy(built, part)
        # tests compile where they ask for it
        patch.setenv("OUTRIDER_COMPILE", "off")
        # compiling in every way to find the fastest takes twice as long; test_step.py does it once, and times the plain
        # path
        patch.setattr(build, "BUILDS", {"libraries": {}})
        patch.setattr(fast_paths.Compiled, "_pays", lambda self, graph: True)
        # every step drafts, whatever it costs: on tiny models drafts pay by chance
        patch.setattr(named, "DEFAULT", "fixed")
        yield Path(os.environ["OUTRIDER_CACHE"])


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted unless a policy is named: what the shipped default does where drafts cost more than they
    bring."""
    monkeypatch.setattr(named, "POLICIES", {**named.POLICIES, "spares": lambda _limit, _kept: Fixed(0)})
    monkeypatch.setattr(named, "DEFAULT", "spares")


@pytest.fixture(autouse=True)
def audible() -> None:
    """Warnings can be heard: libraries that a test loads (lm-eval, accelerate) may have turned loggers down for the
    process."""
    logging.disable(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "outrider" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def target() -> TransformersTarget:
    return load_target(tiny_model().to(DEVICE))


@pytest.fixture(scope="session")
def short_target() -> TransformersTarget:
    """The same weights with a context of 20 tokens."""
    return load_target(tiny_model(max_position_embeddings=20).to(DEVICE))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Texts of unequal length, one of a single token, one that repeats itself."""
    generator = torch.Generator().manual_seed(7)
    lengths = (5, 1, 11, 3, 17, 1, 8)
    texts = [torch.randint(64, (length,), generator=generator).tolist() for length in lengths]
    return [*texts, [3, 9, 4, 3, 9, 4, 3, 9]]


Plain = Callable[[Target, list[int], int], list[int]]


@pytest.fixture(scope="session")
def plain() -> Plain:
    """`model.generate`, greedy: (target, prompt, count) to the new tokens."""

    @functools.cache
    def continued(target: TransformersTarget, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        text = torch.tensor([prompt], device=target.device)
        out = target.model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(out[0, len(prompt) :].tolist())

    def cut(target: TransformersTarget, prompt: list[int], count: int) -> list[int]:
        # greedy text of n tokens begins greedy text of m > n: one run serves all
        return list(continued(target, tuple(prompt), -(-count // 48) * 48)[:count])

    return cut


# ── every drafter at its smallest ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """A drafter and the variant of it that is tested."""

    kind: str
    choices: dict[str, Any] = field(default_factory=dict)
    is_variant: bool = False
    """Another case of this kind came before."""

    def __str__(self) -> str:
        return "-".join([self.kind, *map(str, self.choices.values())])

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def trains(self) -> bool:
        return hasattr(usable(self.kind), "Model")


def usable(kind: str) -> ModuleType | None:
    """The drafter's module; None where it can't be used, which each of its own tests then says, and no other."""
    try:
        return drafters.find(kind)
    except ConfigError:
        return None


def cases() -> list[Case]:
    """Every drafter found, own and third-party; one case more for each value of `markov`, and some for trees.

    Left out is what needs texts that both models can read, which the tiny target has none of (see
    `test_cross_vocabulary`), and what needs a target of bytes, for which the suite runs again (see `test_byte_suite`).
    """
    found = []
    for kind in sorted(drafters.kinds().keys() - {"cross_vocabulary", *OF_BYTES}):
        module = usable(kind)
        fields = module.Config.model_fields if module is not None else {}
        markov = fields.get("markov")
        choices = typing.get_args(markov.annotation) if markov else ()
        found += [Case(kind, {"markov": choice}, n > 0) for n, choice in enumerate(choices)] or [Case(kind)]
        # the tree is dflash's, or one of pairs
        if "siblings" in fields and kind not in ("domino", "dflash2", "lilicorr"):
            found.append(Case(kind, {"siblings": (2, 1)}, True))
        if kind == "dflash":
            found.append(Case(kind, {"anchor_predicts": False}, True))
        if kind == "dflash2":
            found += [Case(kind, {"nodes": 7}, True), Case(kind, {"window": 9, "vocabulary": 40}, True)]
        if kind == "lilicorr":
            found.append(Case(kind, {"nodes": 7, "vocabulary": 40}, True))
        if kind == "dspark":
            found.append(Case(kind, {"vocabulary": 40}, True))
        if kind == "ngram":
            found.append(Case(kind, {"tree": "frequency", "shared": "all"}, True))
        if kind == "medusa":
            found.append(Case(kind, {"sequential": True, "heads": 3}, True))
        if "replacement" in fields:
            found.append(Case(kind, {"width": 2, "nodes": 6}, True))
    return found


FEW = ("ngram", "recycle", "small_model", "medusa", "eagle3", "dspark")
"""One kind of each sort: a text index, a tree without weights, a model, heads, a step module, a block."""


REST = 8
"""How many of a grid's slow cells a run of all tests draws."""


def fast(cases: Iterable[Case], of: Collection[str] | None = None) -> list[Any]:
    """Parameters of a test: the first case of every kind, or of the kinds `of` alone; `make test-all` draws more."""
    cases = list(cases)
    quick = [case for case in cases if not case.is_variant and (of is None or case.kind in of)]
    return _some_slow(cases, quick, ids=str)


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test, the first of which are fast; `make test-all` draws more."""
    values = list(values)
    return _some_slow(values, values[:count])


def _some_slow(values: list[Any], quick: list[Any], ids: Callable[[Any], str | None] = lambda value: None) -> list[Any]:
    some = sampled(values, REST, quick)
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow, id=ids(value)) for value in some]


@dataclass(frozen=True)
class Workshop:
    """Builds small drafters for any target."""

    folder: Path
    shared: Path
    """Of all workers of the run."""

    def config(self, case: Case, target: Target) -> object:
        schema = drafters.find(case.kind).Config
        values: dict[str, object] = {key: value for key, value in SMALL.items() if key in schema.model_fields}
        values |= SMALL_OF.get(case.kind, {}) | case.choices
        if "model" in schema.model_fields:
            values["model"] = (self._assistant_folder if case.kind == "gemma4_assistant" else self._model_folder)(
                target
            )
        return schema(**values)

    def model(self, case: Case, target: Target) -> DraftModel:
        torch.manual_seed(1)
        model = drafters.find(case.kind).Model(self.config(case, target), target)
        return model.to(target.device, getattr(torch, target.spec.dtype))

    def build(self, case: Case, target: Target) -> Drafter:
        torch.manual_seed(1)
        return drafters.find(case.kind).build(self.config(case, target), target)

    def _assistant_folder(self, target: Target) -> str:
        """An assistant whose heads fit the target's keys; its head is fitted, so that it often agrees with the
        target."""
        path = self.folder / f"assistant-{target.spec.name}-{target.spec.vocabulary}"
        own = target.model.config.get_text_config()
        if not path.exists():
            wide = 2 * target.spec.hidden
            text = Gemma4TextConfig(
                vocab_size=target.spec.vocabulary, hidden_size=wide, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=own.num_key_value_heads, head_dim=own.head_dim,
                global_head_dim=own.head_dim, layer_types=["full_attention"] * 2, num_kv_shared_layers=2,
                vocab_size_per_layer_input=0, hidden_size_per_layer_input=0, initializer_range=0.3, pad_token_id=None,
            )  # fmt: skip
            torch.manual_seed(1)
            with keyless_layers():
                config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target.spec.hidden)
                model = Gemma4AssistantForCausalLM(config).double()
            texts = torch.randint(target.spec.vocabulary, (80, 30), generator=torch.Generator().manual_seed(2))
            texts, model = texts.to(target.device), model.to(target.device)
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.post_attention_layernorm.weight *= 0.05
                    layer.post_feedforward_layernorm.weight *= 0.05
                model.pre_projection.weight.copy_(torch.eye(wide))
                hidden, _ = target.read(texts, ())
                pairs = model.model.norm(torch.cat([target.embed(texts[:, 1:]), hidden[:, :-1]], -1)).flatten(0, 1)
                said = torch.nn.functional.one_hot(target.head(hidden[:, 1:]).argmax(-1), target.spec.vocabulary)
                model.lm_head.weight.copy_(10 * torch.linalg.lstsq(pairs, said.flatten(0, 1).double()).solution.T)
            model.save_pretrained(path)
        return str(path)

    def _model_folder(self, target: Target) -> str:
        """A language model that often agrees with the target, saved without a tokenizer."""
        path = self.folder / f"{target.spec.name}-{target.spec.vocabulary}"
        if not path.exists():
            layers = 4 if target.spec.hidden == 32 else 1
            model = tiny_model(vocab_size=target.spec.vocabulary, num_hidden_layers=layers)
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.04 * torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
            model.save_pretrained(path)
        return str(path)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shared = of_all_workers(tmp_path_factory) / "trained"
    shared.mkdir(exist_ok=True)
    return Workshop(tmp_path_factory.mktemp("models"), shared)


def batch_of(target: Target, taps: tuple[int, ...], tokens: torch.Tensor) -> Batch:
    hidden, tapped = target.read(tokens, taps)
    tapped = hidden[:, :, None][:, :, :0] if tapped is None else tapped
    everything = torch.ones_like(tokens)
    return Batch(tokens, everything.bool(), everything, tapped, hidden)


def train(model: DraftModel, batch: Batch, steps: int, lr: float = 1e-2, seed: int = 0) -> list[float]:
    """Cross entropy, every term of the method's own added.  Returns the losses."""
    torch.manual_seed(seed)
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
    totals = []
    for _ in range(steps):
        optimiser.zero_grad()
        rows = model.predict(batch)
        total = 0.0
        for draft, own, part in rows.chunks(64):
            terms = losses.ce(draft, own, rows.labels[part])
            terms = terms + sum(rows.extra(part, draft, own).values())
            loss = (terms * rows.weight[part]).sum() / rows.weight.sum()
            loss.backward()
            total += loss.item()
        rows.backward()
        optimiser.step()
        totals.append(total)
    return totals


@pytest.fixture(scope="session")
def drafter_of(
    workshop: Workshop, target: TransformersTarget, prompts: list[list[int]], plain: Plain
) -> Callable[[Case], Drafter]:
    """Drafters for the tiny target, those that learn trained until some of their tokens are kept."""
    return trained_drafters(workshop, target, prompts, plain)


def trained_drafters(
    workshop: Workshop, target: Any, prompts: list[list[int]], plain: Plain
) -> Callable[[Case], Drafter]:
    """Drafters for a target; those that learn are trained on its texts, each once for all workers."""

    @functools.cache
    def made(case: Case) -> Drafter:
        if not case.trains:
            return workshop.build(case, target)
        model = workshop.model(case, target)
        weights = workshop.shared / f"{target.spec.name}-{target.spec.vocabulary}-{target.spec.hidden}-{case}.pt"
        with FileLock(f"{weights}.lock"):
            if weights.exists():
                model.load_state_dict(torch.load(weights))
            else:
                texts = [(prompt + plain(target, prompt, 48))[:40] for prompt in prompts]
                train(model, batch_of(target, model.taps, torch.tensor(texts, device=target.device)), 60)
                torch.save(model.state_dict(), weights)
        return model.eval().drafter()

    return made
