"""The target answers the prompts, here a batch of slots at a time, or on servers; every finished conversation is
written at once.

A crash loses only unfinished answers, and none is written twice; a torn last line is cut off.
"""

import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from outrider.data.answers import servers
from outrider.data.answers.ledger import Ledger
from outrider.data.answers.record import OnAnswer, Record
from outrider.data.answers.sharing import Together, part, take_in
from outrider.data.answers.store import (
    ANSWERS,
    Answer,
    agreed,
    checker,
    hash_number,
    iterate_answers,
    keep_hashes,
    manifest_of,
    put_in_order,
    whose,
    write_manifest,
)
from outrider.data.answers.talks import Asked, Talk, iterate_asked
from outrider.data.config import Config
from outrider.data.rendering import check_template, render
from outrider.data.sources.conversations import Conversation, Skipped, at_place
from outrider.data.sources.duplicates import content_hash
from outrider.data.sources.spool import Spool
from outrider.decoding.protocols import Drafter
from outrider.errors import DataError
from outrider.generation import serve
from outrider.processes import ALONE
from outrider.storage.atomic import whole_lines
from outrider.storage.lock import held
from outrider.targets.protocol import Target
from outrider.targets.text.prompts import refuse_unembedded

WAVE = 4096
"""Conversations that are in memory at the same time."""
SHARED_WAVE = 4
"""Conversations for each slot that one of several processes takes at a time."""


def prepare(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: str | Path, config: Config,
    drafter: Drafter | None = None, on_answer: OnAnswer | None = None, skipped: Skipped | None = None,
    processes: Together = ALONE, held_out: Collection[int] = (),
) -> Path:  # fmt: skip
    """Write the answers of all conversations that have none yet; returns the file.

    conversations: read once, and never held as a whole: a file in the folder has them meanwhile.
    drafter: changes the speed, not the text.
    on_answer: gets the number of these conversations that are answered, and the newest answer.
    skipped: gets what the chat template refuses, with `config.skip_bad`.
    processes: that share the prompts, each of which calls this; the first one brings their answers together.
    held_out: `hash_number` of prompts whose answers never train; the n-gram hashes leave them out.
    Raises DataError where the folder holds answers of another target, sampling or template, or another process writes
    there, with file and line for a conversation that the chat template refuses, and where no server answers.
    """
    folder, path, skipped = Path(folder), Path(folder, ANSWERS), Skipped() if skipped is None else skipped
    busy = DataError(f"another process is writing answers to {folder}; wait for it, or name another prepare.folder")
    tell = on_answer or (lambda *_: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if processes.rank:
            _help(target, tokenizer, conversations, folder, config, drafter, tell, skipped, processes)
            return path
        with held(folder, busy), Ledger(folder) as ledger, ledger.reported(), Spool(folder) as spool:
            mine = agreed(whose(target, tokenizer, config), manifest_of(folder))
            take_in(folder)  # what a stopped run's other processes wrote
            _enter(ledger, spool, folder, tokenizer, target, conversations, config, mine, skipped)
            processes.gather(None)  # from here on the others take prompts
            with path.open("a", encoding="utf-8") as file:
                done, is_shared = ledger.counts()["answered"], processes.count > 1
                record = Record(file, ledger, content_hash(mine), done, tell, skipped, is_shared)
                _answer_all(target, tokenizer, _open(spool, ledger, is_shared), config, drafter, record)
            processes.gather(None)  # all prompts are answered
            take_in(folder)
            put_in_order(path, ledger.position)
            if config.ngram_hashes:
                keep_hashes(folder, target, _prompts(spool, ledger, held_out), held_out)
    except OSError as error:
        why = f"{error.strerror or error}; what is written stays; make room and run again"
        raise DataError(f"can't write answers to {folder}: {why}") from error
    processes.gather(None)  # the others may read the file
    return path


def _help(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: Path, config: Config,
    drafter: Drafter | None, on_answer: OnAnswer, skipped: Skipped, processes: Together,
) -> None:  # fmt: skip
    """In a process after the first: answer prompts that no other has taken, into a file of its own."""
    processes.gather(None)
    if config.regenerate and not config.servers:  # else one process is enough
        mine = agreed(whose(target, tokenizer, config), manifest_of(folder))
        with Ledger(folder) as ledger, ledger.reported(), part(folder, processes.rank).open("a") as file:
            record = Record(file, ledger, content_hash(mine), 0, on_answer, skipped, is_shared=True)
            asked = iterate_asked(conversations, config)
            _answer_all(target, tokenizer, _open(asked, ledger, is_shared=True), config, drafter, record)
    processes.gather(None)  # all prompts are answered
    processes.gather(None)  # and brought together


# ── before the first answer ───────────────────────────────────────────────────────────────────────────────────────────


def _enter(
    ledger: Ledger, spool: Spool, folder: Path, tokenizer: Any, target: Target, conversations: Iterable[Conversation],
    config: Config, mine: dict[str, Any], skipped: Skipped,
) -> None:  # fmt: skip
    """Bring the ledger up to date: the lines that there are, and this run's prompts, which the spool gets too.

    Raises DataError for a prompt that the chat template refuses, unless `config.skip_bad`.
    """
    theirs = manifest_of(folder)
    for _ in whole_lines(folder / ANSWERS):  # cuts off a torn last line
        pass
    with ledger.transaction():
        # where answers.json is lost, the answers' settings_hash is compared
        ledger.reconcile(_lines(folder, target.spec.vocabulary, checker(folder, mine, theirs or mine)))
        for position, one in enumerate(iterate_asked(conversations, config)):
            spool.add(one)
            status = ledger.ask(one.prompt_hash, one.conversation.id, position)
            if status == "open" and config.regenerate:  # given answers are checked when they are rendered
                _check(tokenizer, target.spec.vocabulary, one, config, ledger, skipped)
    if theirs != mine:
        write_manifest(folder, mine)


def _lines(folder: Path, vocabulary: int, check: Callable[[int, Answer], None]) -> Iterator[tuple[str, str]]:
    """Prompt hash and id of every answer, each checked."""
    if (folder / ANSWERS).exists():
        for number, answer in enumerate(iterate_answers(folder / ANSWERS, vocabulary), 1):
            check(number, answer)
            yield answer.prompt_hash or "", str(answer.id)


def _check(
    tokenizer: Any, vocabulary: int, one: Asked, config: Config, ledger: Ledger, skipped: Skipped
) -> None:  # fmt: skip
    try:
        check_template(tokenizer, one.conversation, config.enable_thinking)
        with at_place(one.conversation):
            refuse_unembedded((message["content"] for message in one.questions), tokenizer, vocabulary)
    except DataError as error:
        if not config.skip_bad:
            raise
        skipped.reasons.append(str(error))
        ledger.skip(one.prompt_hash, str(error))


def _open(asked: Iterable[Asked], ledger: Ledger, is_shared: bool) -> Iterator[Asked]:
    """Prompts that have no answer yet and were not skipped; of those that processes share, what this one takes."""
    if is_shared:
        return (one for one in asked if ledger.take(one.prompt_hash))
    return (one for one in asked if ledger.status(one.prompt_hash) == "open")


def _prompts(asked: Iterable[Asked], ledger: Ledger, held_out: Collection[int]) -> Iterator[list[str]]:
    """The texts of each prompt that has an answer to train on."""
    for one in asked:
        if hash_number(one.prompt_hash) not in held_out and ledger.status(one.prompt_hash) == "answered":
            yield [message["content"] for message in one.questions]


# ── the answers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _answer_all(
    target: Target, tokenizer: Any, unanswered: Iterator[Asked], config: Config, drafter: Drafter | None, record: Record
) -> None:
    if not config.regenerate:
        _take_given(target, tokenizer, unanswered, config, record)
    elif config.servers:
        servers.answer_all(target, tokenizer, unanswered, config, record)
    else:
        most = SHARED_WAVE * config.slots if record.is_shared else WAVE
        while wave := list(islice(unanswered, most)):
            for answer in _answers(target, tokenizer, wave, config, drafter, record):
                record.answer(answer)


def _take_given(
    target: Target, tokenizer: Any, unanswered: Iterable[Asked], config: Config, record: Record
) -> None:  # fmt: skip
    """Write the conversations' own answers, rendered."""
    for one in unanswered:
        try:
            with at_place(one.conversation):
                texts = (message["content"] for message in one.conversation.messages)
                refuse_unembedded(texts, tokenizer, target.spec.vocabulary)
                tokens, learn, unstable = render(
                    tokenizer, one.conversation.messages, config.length, config.enable_thinking, one.conversation.tools
                )
        except DataError as error:
            if not config.skip_bad:
                raise
            record.skipped.reasons.append(str(error))
            record.skip(one.prompt_hash, str(error))
            continue
        record.skipped.unstable += unstable
        if learn:
            record.answer(Answer(one.conversation.id, tokens, learn, prompt_hash=one.prompt_hash))
        else:
            record.skip(one.prompt_hash, f"it has no answer within {config.length} tokens")


def _answers(
    target: Target, tokenizer: Any, unanswered: list[Asked], config: Config, drafter: Drafter | None, record: Record
) -> Iterator[Answer]:
    """The target's answers, each as soon as its conversation is over."""
    talks = [Talk(one) for one in unanswered]
    while talks:
        asked = []
        for talk in talks:
            if talk.ask(tokenizer, config, target.spec.context):
                asked.append(talk)
            else:
                record.no_room(talk, config, target.spec.context)
        answers: list[list[int]] = [[] for _ in asked]
        for progress in serve(target, [talk.request(config) for talk in asked], drafter, slots=config.slots):
            talk, answer = asked[progress.request], answers[progress.request]
            answer += progress.tokens
            if progress.finish_reason is not None:
                talk.add_answer(answer, target.decode(answer))
                if talk.over:  # yielded as soon as its last answer ends
                    yield talk.answer(progress.finish_reason)
        talks = [talk for talk in asked if not talk.over]


# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(folder: Path, hashes: np.ndarray) -> int:
    """How many of these prompts, [n] uint64, have an answer in the folder; another process may be writing more."""
    known = array("Q")
    try:
        with (folder / ANSWERS).open("rb") as file:
            known.extend(hash_number(json.loads(line).get("prompt_hash")) for line in file if line.endswith(b"\n"))
    except (FileNotFoundError, ValueError, AttributeError):  # `prepare` names the damaged line
        return 0
    return int(np.isin(hashes, np.array(known, np.uint64)).sum())
