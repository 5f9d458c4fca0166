"""A run file: target, drafter, and a section for each stage.  It is checked before any weights are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from outrider import config as configs
from outrider.config import Config as Base
from outrider.config import Quantization
from outrider.data.config import Config as PrepareConfig
from outrider.drafters import find, kinds, trained
from outrider.errors import ConfigError
from outrider.measure.config import Config as EvaluateConfig
from outrider.runs.start import settings_from
from outrider.serve.config import Config as ServeConfig
from outrider.training.config import Config as TrainConfig


class TargetConfig(Base):
    """The model that verifies."""

    name: str
    """`demo`, a Hugging Face id, a folder, or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id; its main branch unless given."""
    device: str | None = None
    """cpu, cuda, cuda:1 …; defaults to the accelerator, if there is one."""
    device_map: str | dict[str, int | str] | None = None
    """Which part goes on which device, in transformers' format: auto, or module names with devices or disk."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of processes among which every layer is split; torchrun starts them, see docs/many_devices.md."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] | None = None
    """Defaults to float32 on a CPU and the checkpoint's own type elsewhere; auto: the checkpoint's own where that is
    fast."""
    quantize: Quantization | None = None
    """Round the weights of the linear layers: q8_0, q4_0 and q4_k to blocks of GGUF files, on the CPU; int8 needs
    torchao.  The output is then the quantised model's own."""
    activations: Literal["float32", "int8"] | None = None
    """Type of the activations that block-quantised weights are multiplied with: float32 by default; int8 rounds them,
    so that sums of integers are exact."""
    adapter: str | None = None
    """Folder of a LoRA adapter of peft's, merged into the weights as they load."""
    trust_remote_code: bool = False
    """Run code that comes with the model.  Read that code first."""
    compile: bool | None = None
    """Compile its steps and the drafters'; see docs/fast.md.  By default this is done once per machine where possible;
    a server's steps are compiled in the background."""

    def load_options(self) -> dict[str, Any]:
        """Arguments of `load_target` besides the name, for work long enough to justify compiling first."""
        return self.model_dump(exclude={"name"}) | ({"compile": "auto"} if self.compile is None else {})


class RunConfig(Base):
    """A run file.  `target: NAME` is short for `target: {name: NAME}`."""

    name: str
    """Name of the run, whose folder is runs/NAME; defaults to the file's name."""
    target: TargetConfig
    """The model that verifies: its name, or a section."""
    drafter: dict[str, Any]
    """`kind` and that drafter's own settings; see `outrider drafters`.  `from: FOLDER` starts from a trained one."""
    prepare: PrepareConfig = Field(default_factory=PrepareConfig)
    """Where conversations come from, and how the target answers them."""
    train: TrainConfig | None = None
    """How the draft model is trained; without this section there is no training."""
    evaluate: EvaluateConfig | None = None
    """What is measured; without this section there is no evaluation."""
    serve: ServeConfig | None = None
    """How `outrider serve` serves it; defaults to the section's defaults."""
    usual_minutes: dict[Literal["prepare", "train", "evaluate"], PositiveFloat] = Field(default={})
    """Minutes of each stage where the file was tried; a stage that will take three times as long says why."""

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name

    @property
    def answers(self) -> Path:
        return Path(self.prepare.folder) if self.prepare.folder else self.folder / "answers"

    @property
    def drafter_config(self) -> Base:
        """The drafter's own Config, validated."""
        return drafter_config({key: value for key, value in self.drafter.items() if key != "from"})


def drafter_config(values: dict[str, Any], where: str = "drafter") -> Base:
    """The drafter's Config from `kind` and settings.  Raises ConfigError for an unknown kind or key."""
    if not isinstance(values.get("kind"), str):
        raise ConfigError(f"{where}: kind is missing or not a string; write the kind of drafter, such as kind: dspark")
    try:
        module = find(values["kind"])
    except ConfigError as error:
        raise ConfigError(f"{where}.kind: {error}") from None
    return configs.build(module.Config, values, where)


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[str, str]]:
    """A run file with overrides applied, and the origin of every value (file, override, default).

    Raises ConfigError for everything wrong with it, before any weights are loaded.
    """
    file_values = _expand(configs.read(path))
    merged = _expand(configs.override(file_values, overrides))
    merged.setdefault("name", Path(path).stem)
    with configs.located(path, overrides):
        run = configs.build(RunConfig, merged)
        if "from" in run.drafter:
            run = _started(run)
        settings = run.drafter_config.model_dump(mode="json")
        _check_stages(run)
    origin = {"from": run.drafter["from"]} if "from" in run.drafter else {}
    taken = {f"drafter.{key}" for key in run.drafter} if origin else set()
    run = run.model_copy(update={"drafter": origin | settings})
    in_file, overridden = configs.flatten(file_values), {item.partition("=")[0] for item in overrides}
    origins = {
        key: "file" if key in in_file else "from" if ".".join(key.split(".")[:2]) in taken else "default"
        for key in configs.flatten(run.model_dump(mode="json"))
    }
    return run, origins | {key: "override" for key in origins if any(f"{key}.".startswith(f"{a}.") for a in overridden)}


def _started(run: RunConfig) -> RunConfig:
    """The run with the settings of the trained drafter it starts from."""
    target = run.target
    more = sorted(run.drafter.keys() - {"from", "kind"})
    if run.train is None and more:
        what = f"drafter.{more[0]} would have no effect: a trained drafter is measured as it is"
        raise ConfigError(f"{what}; leave it out, or add a `train:` section")
    return run.model_copy(
        update={"drafter": settings_from(run.drafter, target.name, target.revision, target.trust_remote_code)}
    )


def _check_stages(run: RunConfig) -> None:
    """Refuse early what a later stage would refuse after hours of work."""
    for folder in (run.folder, run.answers):
        if file := next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None):
            raise ConfigError(
                f"{file} is a file, but must be a folder; move it, or choose another name or prepare.folder"
            )
    if run.train is not None:
        _check_training(run, run.train, run.drafter["kind"])
    for name in run.evaluate.baselines if run.evaluate is not None else ():
        if isinstance(name, dict):
            drafter_config(name, "evaluate.baselines")
        elif name not in kinds() and "/" not in name and not Path(name).exists():
            raise ConfigError(
                f"evaluate.baselines: {name!r} is neither a drafter nor a folder{configs.nearest(name, kinds())}"
            )


def _check_training(run: RunConfig, train: TrainConfig, kind: str) -> None:
    if trained(kind) is None:
        raise ConfigError(f"drafter {kind!r} has nothing to train; leave the `train:` section out")
    if train.calibrate and run.evaluate is None:
        raise ConfigError(
            "train.calibrate takes its prompts from evaluate.tasks; add an `evaluate:` section, or set "
            "train.calibrate to 0"
        )
    if train.calibrate and not getattr(run.drafter_config, "confidence", False):
        problem = f"drafter {kind!r} with these settings has none"
        remedy = "use dspark with confidence: true, or set train.calibrate to 0"
        raise ConfigError(f"train.calibrate needs a confidence head, but {problem}; {remedy}")
    if train.reference is not None and not Path(train.reference).exists():
        raise ConfigError(
            f"train.reference {train.reference} does not exist; name the checkpoint of the same drafter, trained on "
            "all rows"
        )


def _expand(values: dict[str, Any]) -> dict[str, Any]:
    short = {"target": "name", "drafter": "kind"}
    drafter = values.get("drafter")
    if isinstance(drafter, str) and drafter not in kinds() and ("/" in drafter or Path(drafter).exists()):
        short["drafter"] = "from"  # a trained drafter
    return {
        key: {short[key]: value} if key in short and isinstance(value, str) else value for key, value in values.items()
    }
