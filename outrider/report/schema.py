"""The schema of report.json.  No measurement, no wording, no torch.

The names in report.json are a public interface under `schema` 1: they are kept, and more may be added.  Fields unknown
to this version survive load and save.  Numbers that are not finite are null, and null means "not measured", never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from outrider.errors import DataError
from outrider.report.parts import (
    Clean,
    Group,
    LeftOut,
    Load,
    Part,
    Percentiles,
    PositionRange,
    PromptResult,
    Range,
    Rejections,
    Share,
    TaskSource,
    TracedPrompt,
    Training,
    finite,
)
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text

SCHEMA = 1


class Row(Part):
    """One drafter on one task at one temperature.  Fields without a default are always present, null if not
    measured."""

    drafter: str
    task: str
    prompts: int
    temperature: float
    tokens_per_step: float | None
    """Tokens committed per target pass, bonus token included."""
    accepted_by_depth: tuple[float | None, ...]
    """[k]: share of the drafts reaching depth k + 1 whose first k + 1 tokens were all accepted."""
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    """The target alone, through the same loop."""
    speedup: float | None
    exact: bool | None
    """Whether every text equals the target's own, token for token; null if not compared, as at temperatures above 0."""
    compared_tokens: int | None
    share: Share
    ttft_ms: Percentiles
    itl_ms: Percentiles
    """Gaps between steps, as a user sees them."""
    conditional_acceptance: tuple[float | None, ...] = ()
    """[k]: the same, given that the first k were accepted."""
    token_acceptance: float | None = None
    """Accepted share of the judged drafted tokens, those up to the first rejection."""
    draft_acceptance: float | None = None
    """Accepted share of all drafted tokens on the path; lower for longer drafts."""
    expected_acceptance: float | None = None
    """Mean of sum(min(p, q)) over the judged tokens of the traced prompts: acceptance without sampling noise."""
    accepted_histogram: tuple[tuple[int, ...], ...] = ()
    """[k][a]: steps that drafted k tokens deep and accepted a of them."""
    wasted: float | None = None
    """Share of drafted tokens that were verified in vain, including rejected branches."""
    predicted_by_depth: tuple[float | None, ...] = ()
    """`accepted_by_depth` as measured in training on held-out answers; empty if it was not, or for texts at a higher
    temperature."""
    speedup_range: Range | None = None
    """`speedup` with its interval; null for fewer than 5 prompts."""
    speedup_geomean: Range | None = None
    """Geometric mean of the prompts' own speed-ups, with its interval."""
    speedup_of_means: float | None = None
    """Mean tokens/s over mean plain tokens/s, as in Spec-Bench."""
    tokens_per_step_range: Range | None = None
    tpot_curve_ms: tuple[float | None, ...] = ()
    """Percentiles 0 to 100 of `tpot_ms`, over prompts."""
    memory_peak_bytes: int | None = None
    """Peak memory of the process, or of the device, while the row was measured."""
    rejections: Rejections | None = None
    traced: tuple[TracedPrompt, ...] = ()
    """A few prompts in full."""
    clean: Clean | None = None
    by_group: tuple[Group, ...] = ()
    """By the prompts' language or category, in alphabetical order; empty if no prompt has one."""
    by_position: tuple[PositionRange, ...] = ()
    """By position in the text: before 1,024 tokens, 4,096, 16,384 and after; ranges without a step are omitted."""
    rejections_by_depth: tuple[int, ...] = ()
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    generate_tokens_per_s: float | None = None
    """transformers' own generate with the target alone, in the same run."""
    loop_overhead: float | None = None
    """Fraction of a step spent outside the calls into the two models."""
    plain_loop_overhead: float | None = None
    noise: Literal["own"] | None = None
    """Above temperature 0: whether drafts use their own noise, as for requests without a seed.  Null in older reports,
    whose drafts shared the target's noise, so that fewer were accepted."""
    plain_exact: bool | None = None
    """Whether the target alone, in the same loop, generates the same text as transformers' generate."""
    tpot_ms: Percentiles = Percentiles()
    """Time per token after the first step, over prompts."""
    plain_tpot_ms: Percentiles = Percentiles()
    """The same for the target alone, to compare with `tpot_ms`."""
    plain_tpot_curve_ms: tuple[float | None, ...] = ()
    plain_itl_ms: Percentiles = Percentiles()
    plain_ttft_ms: Percentiles = Percentiles()
    itl_curve_ms: tuple[float | None, ...] = ()
    """Percentiles 0 to 100 of the gap between steps."""
    plain_itl_curve_ms: tuple[float | None, ...] = ()
    dtype: str | None = None
    precision: str | None = None
    """int8 or similar if the target was quantised, otherwise its number type."""
    trained_on: str | None = None
    """Precision of the target when the drafter was trained, or `unquantised weights`; null if unknown."""
    tokens_per_step_lost: float | None = None
    """How many more the drafter had at the precision used in training, over the same prompts; null if not measured."""
    batch: int | None = None
    """Prompts that were served together."""
    possible_speedup: float | None = None
    """The maximum that tokens per step and the undisturbed times of the passes allow."""
    contention: float | None = None
    """Share of the measured time taken by other programs; null if the system does not report it."""
    under_load: str | None = None
    """Why the speed-up can't be trusted; null if it can."""
    device: str | None = None
    invalid: int | None = None
    """Number of drafted nodes whose q was not a distribution or whose id was not a token; they are verified as
    deterministic."""
    rule: str | None = None
    """The lossy acceptance rule with its settings; null under the exact rule."""
    policy: str | None = None
    """How much was drafted, as in `evaluate.policy`; `own` for a custom policy, null means fixed."""
    verification: str | None = None
    """How drafts were judged, as in `evaluate.verification`; null means standard."""
    lossless: bool | None = None
    """False under a lossy rule, even if the texts are equal."""
    distance: float | None = None
    """Mean total variation distance of an emitted token from the target's distribution; 0 under the exact rule."""
    per_prompt: tuple[PromptResult, ...] = ()

    def is_trained_on(self, precision: str | None) -> bool:
        """Whether training used this precision; older checkpoints record only that the weights were unquantised."""
        is_float = precision is not None and precision.removeprefix("b").startswith("float")
        return precision == self.trained_on or (self.trained_on == "unquantised weights" and is_float)

    @property
    def crosses_precisions(self) -> bool:
        """Whether it was trained on a target precision other than the one it is served with."""
        return None not in (self.trained_on, self.precision) and not self.is_trained_on(self.precision)

    @property
    def different(self) -> list[PromptResult]:
        """Prompts whose text is not the target's own."""
        return [prompt for prompt in self.per_prompt if prompt.exact is False]

    @property
    def is_inexact(self) -> bool:
        return self.exact is False or bool(self.different)


class Report(Part):
    """The results of one evaluation."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    target: str
    provenance: dict[str, Any] = Field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    share_left_out: float | None = None
    cut: dict[str, int] = Field(default_factory=dict)
    """Prompts cut at the front to leave room for an answer, with the tokens each lost."""
    training: dict[str, Training] = Field(default_factory=dict)
    tasks: dict[str, TaskSource] = Field(default_factory=dict)
    made: str = ""
    """ISO time."""
    notes: tuple[str, ...] = ()
    machine_load: Load | None = None
    fingerprint: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Machine and versions that times depend on; a gate compares only reports that agree in all of them."""

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Load a file, or a folder's report.json.  Raises DataError if it can't be read."""
        path = Path(path)
        path = path / "report.json" if path.is_dir() else path
        try:
            values = parse_json(whole_text(path))
        except FileNotFoundError:
            raise DataError(f"no report at {path}; write one with `outrider evaluate`") from None
        except (OSError, ValueError) as error:
            raise DataError(f"can't read report {path}: {error}; restore it, or measure again") from None
        version = values.get("schema", "none") if isinstance(values, dict) else "none"
        if version != SCHEMA:
            raise DataError(
                f"{path} has schema {version!r}, but this Outrider reads schema {SCHEMA}; open it with the version "
                "that wrote it"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"report {path} is damaged at {where}: {first['msg']}; restore it, or measure again"
            ) from None

    def json_text(self) -> str:
        """The text of report.json."""
        values = finite(self.model_dump(mode="json", by_alias=True))
        return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, folder: str | Path) -> Path:
        """Write report.json atomically.  Returns the folder.  `page.save` also writes the page."""
        write_whole({Path(folder) / "report.json": self.json_text()})
        return Path(folder)

    def brief(self, drafter: str) -> dict[str, Any]:
        """One drafter's figures, the machine and the commit, for the manifest of its checkpoint."""
        fields = (
            "task",
            "temperature",
            "prompts",
            "tokens",
            "tokens_per_step",
            "accepted_by_depth",
            "speedup",
            "exact",
        )
        rows = [row.model_dump(mode="json", include=set(fields)) for row in self.rows if row.drafter == drafter]
        where = {"made": self.made, "commit": self.provenance.get("commit"), "fingerprint": dict(self.fingerprint)}
        summary: dict[str, Any] = finite(where | {"rows": rows})
        return summary

    @property
    def lead(self) -> Row | None:
        """The row for the headline: the fastest exact one, otherwise the fastest not compared, otherwise the fastest of
        all."""
        rank = lambda row: (0 if row.is_inexact else 2 if row.exact else 1, row.speedup or -1.0)
        return max(self.rows, key=rank, default=None)


def write_whole(texts: Mapping[Path, str]) -> None:
    """Write files atomically, creating their folders."""
    try:
        with ExitStack() as stack:
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    except OSError as error:
        names = " and ".join(map(str, texts))
        raise DataError(f"can't write {names}: {error}; choose a folder that can be written") from None
