"""What a drafter was trained with, as its checkpoint records it: rendering, sampling, lengths, kinds of texts, and its
acceptance on held-out answers.  No text is stored.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.data.answers.store import Answer
from outrider.data.config import Config as PrepareConfig
from outrider.diagnosis.walk import Steps
from outrider.targets.protocol import Target
from outrider.traffic.logs.categories import FOREIGN, category_of

KEY = "conditions"
"""In the manifest of a checkpoint or an export, under `training`."""
READ = 64
"""Answers whose text is looked at for languages and categories."""
STOPWORDS: Mapping[str, str] = {
    "English": "the and of to is that for with this are you it was",
    "German": "der die das und nicht ist ein eine mit für auf wie den von zu",
    "French": "le la les des est une dans pour avec vous que qui et du",
    "Spanish": "el los las una para como por está que del es con y",
    "Italian": "il della che di sono non una per con gli le nel è",
    "Portuguese": "os das uma com você não para que do em por é",
    "Dutch": "de het een niet voor van en is dat met op zijn",
}
LATIN_END = 0x250
"""Accented Latin letters end below."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the training's texts were made, and what they are."""

    template: str | None = None
    """The chat template; None without one."""
    thinking: bool | None = None
    """Passed to the template as `enable_thinking`."""
    temperature: float | None = None
    """At which the target generated the answers; None if it did not."""
    ends: tuple[int, ...] = ()
    """Tokens that ended the answers."""
    length: int = 0
    """Tokens of the longest text."""
    languages: Mapping[str, float] = field(default_factory=dict)
    """Language → share of the texts."""
    categories: Mapping[str, float] = field(default_factory=dict)
    """Category of the request → share of the texts."""
    held_out: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Temperature → tokens and expected steps of each held-out answer."""

    @property
    def sampling(self) -> float:
        """The temperature at which its acceptance is promised."""
        return self.temperature or 0.0

    def promise(self, temperature: float) -> list[Steps]:
        """The held-out answers at this temperature; empty if there are none."""
        return [Steps(*pair) for pair in self.held_out.get(f"{temperature:g}", ())]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recorded(manifest: Mapping[str, Any]) -> Conditions | None:
    """The conditions in a manifest; None if it has none that this version can read."""
    stored = (manifest.get("training") or {}).get(KEY)
    if not isinstance(stored, Mapping) or stored.keys() != Conditions.__dataclass_fields__.keys():
        return None
    return Conditions(**{**stored, "ends": tuple(stored["ends"])})


def conditions_of(prepare: PrepareConfig, target: Target, tokenizer: Any, answers: Sequence[Answer]) -> Conditions:
    """The conditions of a training on these answers."""
    step = max(1, len(answers) // READ)
    looked_at = [answers[i] for i in range(0, len(answers), step)][:READ]
    requests = [target.decode(list(answer.tokens[: answer.learn[0][0]])) for answer in looked_at if answer.learn]
    return Conditions(
        template=getattr(tokenizer, "chat_template", None), thinking=prepare.enable_thinking,
        temperature=prepare.temperature if prepare.regenerate else None, ends=tuple(sorted(target.ends)),
        length=max((len(answer.tokens) for answer in answers), default=0),
        languages=shares(language_of(target.decode(list(answer.tokens))) for answer in looked_at),
        categories=shares(category_of(text) for text in requests),
    )  # fmt: skip


def shares(names: Iterable[str]) -> dict[str, float]:
    """The share of each name, the most frequent first."""
    counts = Counter(names)
    return {name: round(count / counts.total(), 3) for name, count in counts.most_common()}


def distance(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """How far two distributions over names differ: 0 if they are equal, 1 if they share no name."""
    return sum(abs(first.get(name, 0.0) - second.get(name, 0.0)) for name in first.keys() | second.keys()) / 2


def language_of(text: str) -> str:
    """The script of a text that is not Latin, else its language by frequent words, else `other`."""
    letters = [letter for letter in text if letter.isalpha()]
    foreign = [letter for letter in letters if ord(letter) >= LATIN_END]
    if letters and len(foreign) >= FOREIGN * len(letters):
        return Counter(unicodedata.name(letter, "other").split()[0].capitalize() for letter in foreign).most_common()[
            0
        ][0]
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    counts = {name: sum(words[word] for word in frequent.split()) for name, frequent in STOPWORDS.items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] else "other"
