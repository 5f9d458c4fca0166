"""The readers of third-party files and answers, each with valid files to damage; for `fuzz.py`.

A reader gets a folder.  It must return or raise an OutriderError: one sentence, quickly and in little memory.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "report")]  # the tiny target and its files
# ruff: noqa: E402

import gguf_models
import gguf_targets
from tiny import write_run_file

from examples import full_report
from outrider import loading
from outrider.client import answers as client_answers
from outrider.client import asking
from outrider.data.answers import store
from outrider.data.config import Config as PrepareConfig
from outrider.data.config import Source
from outrider.data.features import cache
from outrider.data.overlap import hash_files
from outrider.data.sources.conversations import Skipped, from_source
from outrider.engines.tuning import tune
from outrider.errors import OutriderError
from outrider.export.writing import export_folder
from outrider.formats.gguf import reading
from outrider.gate.texts import compare_texts
from outrider.measure.tasks import names
from outrider.plan.paper.anatomy import anatomy
from outrider.report import page, summary
from outrider.report.schema import Report
from outrider.retrieval.corpus import build as corpus_build
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.corpus.texts import texts
from outrider.runs.file import load as load_run
from outrider.serve import batch
from outrider.serve.http import keys
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch
from outrider.traffic import counters
from outrider.traffic.logs import traces
from outrider.traffic.replay.answer import Answer


class Reader(NamedTuple):
    make: Callable[[Path], object]
    """Writes valid files into an empty folder."""
    read: Callable[[Path], object]
    """Reads the folder; may raise an OutriderError."""


def use_up(items: Iterable[Any]) -> None:
    deque(items, maxlen=0)


@functools.cache
def target() -> Any:
    """The tiny target that matches the drafters; its name is its folder."""
    return gguf_targets.make_target(Path(tempfile.mkdtemp(prefix="outrider-fuzz-")) / "tiny")


# ── drafters and targets ──────────────────────────────────────────────────────────────────────────────────────────────


def checkpoint(folder: Path) -> None:
    gguf_targets.fresh("dspark", gguf_targets.SETTINGS["dspark"][1], target(), folder / "draft")


def export(to: str, kind: str, folder: Path) -> None:
    made = gguf_targets.fresh(kind, gguf_targets.SETTINGS[kind][1], target(), folder / "checkpoint")
    export_folder(made, to, folder / "draft", target(), "f32" if to == "gguf" else None)
    shutil.rmtree(made)


def read_drafter(folder: Path) -> None:
    loading.load_drafter(folder / "draft", target())


def gguf_target(folder: Path) -> None:
    gguf_models.write(folder / "model.gguf", gguf_models.model_of("llama"), "Q8_0")


def read_gguf(folder: Path) -> None:
    path = folder / "model.gguf"
    sketch(str(path))
    reading.read_tensors(path)


def target_folder(folder: Path) -> None:
    shutil.copytree(target().spec.name, folder / "target")


def read_folder(folder: Path) -> None:
    anatomy(str(folder / "target"))
    load_target(str(folder / "target"), compile=False)


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "tool_calls": None}]
ROWS = [
    {"id": "a", "messages": [{"role": "system", "content": "be"}, *CHAT], "tools": []},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"prompt": "hi", "response": "yes", "system": "be"}, {"instruction": "do", "input": "x", "output": "y"},
]  # fmt: skip


def lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def conversations(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(lines(ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "rows.txt").write_text("hi\nthere\n")


def tables(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "y"}]} for n in range(9)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def read_conversations(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        use_up(from_source(Source(path=str(path)), PrepareConfig(), Skipped()))


def tasks(folder: Path) -> None:
    (folder / "gsm8k.jsonl").write_text(lines({"question": f"q{n}", "answer": "#### 3"} for n in range(4)))
    (folder / "mt-bench.json").write_text(json.dumps([{"prompt": ["a", "b"], "category": "writing", "prompt_id": 3}]))


def read_tasks(folder: Path) -> None:
    use_up(names.listed(folder))
    for name in ("gsm8k", "mt-bench"):
        use_up(names.prompts(name, 5, data=folder))


def answers(folder: Path) -> None:
    made = [store.Answer(f"a{n}", [1, 2, 3], [(1, 3)], "stop", f"{n:016x}", "s" * 16) for n in range(4)]
    (folder / store.ANSWERS).write_text("".join(store.to_line(one, "s" * 16) for one in made))
    collected = hash_files.Collector("answers")
    collected.add("answers", ["what is the answer to the question of life, the universe and everything, she asked"])
    facts = collected.save(folder / store.NGRAM_HASHES)
    store.write_manifest(folder, {"target": {}, "ngram_hashes": facts})
    binding = cache.Binding({"name": "t"}, None, (1,), "float32")
    (folder / cache.MANIFEST).write_text(json.dumps(binding.as_json()))


def read_answers(folder: Path) -> None:
    store.read_manifest(folder)
    if (file := hash_files.named(folder)) is not None:
        hash_files.read(file).holding("what is the answer to the question of life, the universe and everything?")
    cache.bound(folder)
    use_up(store.StoredAnswers.read(folder / store.ANSWERS, 300))


def corpus(folder: Path) -> None:
    (folder / "texts.jsonl").write_text(lines({"text": f"some text {n}"} for n in range(5)))
    corpus_build.build(folder / "corpus", [[1, 2, 3, 1, 2, 4], [2, 3, 1]], vocabulary=9, sources=[("a", 3)])


def read_corpus(folder: Path) -> None:
    use_up(texts([folder / "texts.jsonl"]))
    corpora.sources(folder / "corpus")
    corpora.look_up(Corpus.open(folder / "corpus"), [1, 2], 4, 3)


# ── requests and reports ──────────────────────────────────────────────────────────────────────────────────────────────

BODY = {"model": "m", "messages": CHAT[:1], "max_tokens": 4, "temperature": 0.5}


def requests(folder: Path) -> None:
    batched = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": BODY} for n in range(3)]
    (folder / "batch.jsonl").write_text(lines(batched))
    (folder / "ask.jsonl").write_text(lines([{"id": "a", "prompt": "hi"}, BODY, "text"]))
    (folder / "one.jsonl").write_text(lines([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]))


def read_requests(folder: Path) -> None:
    use_up(batch.lines_of(folder / "batch.jsonl"))
    asking.read_prompts(folder / "ask.jsonl", {})
    compare_texts(folder / "one.jsonl", folder / "one.jsonl")


LOGS: dict[str, str] = {
    "ours": lines({"t": n * 0.5, "session": "s", "body": BODY, "expected_output_tokens": 4} for n in range(4)),
    "sharegpt": json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 3),
    "burst": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n",
    "mooncake": lines({"timestamp": n, "input_length": 50, "output_length": 5, "hash_ids": [1]} for n in range(3)),
}  # fmt: skip


def logs(folder: Path) -> None:
    for name, text in LOGS.items():
        (folder / f"{name}.jsonl").write_text(text)


def read_logs(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        use_up(traces.read(path).calls())


def run_file(folder: Path) -> None:
    write_run_file(folder / "run.yaml", "demo")
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("prepare:", "prepare: &p", 1))
    keys.add(folder / "keys.json", "ann")
    (folder / "tune.json").write_text(
        json.dumps(
            {"ranges": [[1, 4, 3], [5, 9, 0]], "fixed": {"tokens": 3, "width": 1, "cutoff": None}, "best_ratio": 1.1}
        )
    )


def read_run_file(folder: Path) -> None:
    for read in (
        lambda: load_run(folder / "run.yaml", ["train.steps=3"]), lambda: keys.read(folder / "keys.json"),
        lambda: tune.read(folder / "tune.json"), lambda: tune.read_fixed(folder / "tune.json"),
    ):  # fmt: skip
        with suppress(OutriderError):
            read()


def report(folder: Path) -> None:
    full_report().save(folder)


def read_report(folder: Path) -> None:
    found = Report.load(folder)
    summary.headline(found)
    page.render(found)


# ── answers of servers ────────────────────────────────────────────────────────────────────────────────────────────────

CHOICE = {"index": 0, "message": {"content": "hi"}, "delta": {"content": "hi"}, "finish_reason": "stop", "text": "x"}
ANSWER = {
    "id": "a", "choices": [CHOICE], "model": "m", "data": [{"id": "m"}], "timings": {"draft_n": 3},
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}, "error": None,
}  # fmt: skip
FAILED = {"error": {"message": "no", "type": "invalid", "code": 400, "param": "x"}}
METRICS = """# HELP vllm:spec_decode_num_drafts_total drafts
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 12.0
vllm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} 36.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m",engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",engine="0",position="0"} 12.0
process_start_time_seconds 1.7e9
"""


def served(folder: Path) -> None:
    (folder / "answer.json").write_text(json.dumps(ANSWER))
    (folder / "error.json").write_text(json.dumps(FAILED))
    events = [ANSWER, FAILED, ANSWER]
    (folder / "events").write_text("".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n")
    (folder / "metrics").write_text(METRICS)


def read_served(folder: Path) -> None:
    body, error, events = ((folder / name).read_bytes() for name in ("answer.json", "error.json", "events"))
    for one in (body, error):
        client_answers.parse_error(one)
        Answer(0.0, 400).refuse(one)
        for read in (client_answers.parse_answer, client_answers.parse_models):
            with suppress(client_answers.InvalidResponse):
                raw = read(one)
                if isinstance(raw, dict):
                    client_answers.answer_of(raw, cost=None, attempts=1, request_id=None)
    stream = client_answers.StreamParser()
    with suppress(client_answers.InvalidResponse):
        use_up(stream.feed(events))
        use_up(stream.end())
    counters.read((folder / "metrics").read_bytes().decode("utf-8", "replace"))


READERS: dict[str, Reader] = {
    "checkpoint": Reader(checkpoint, read_drafter),
    "speculators": Reader(functools.partial(export, "speculators", "eagle3"), read_drafter),
    "gguf-drafter": Reader(functools.partial(export, "gguf", "dspark"), read_drafter),
    "gguf-target": Reader(gguf_target, read_gguf),
    "target": Reader(target_folder, read_folder),
    "conversations": Reader(conversations, read_conversations),
    "tables": Reader(tables, read_conversations),
    "tasks": Reader(tasks, read_tasks),
    "answers": Reader(answers, read_answers),
    "corpus": Reader(corpus, read_corpus),
    "requests": Reader(requests, read_requests),
    "logs": Reader(logs, read_logs),
    "run-file": Reader(run_file, read_run_file),
    "report": Reader(report, read_report),
    "served": Reader(served, read_served),
}
