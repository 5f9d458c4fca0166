"""The target answers the prompts, in local batches or on servers; every finished conversation is written at once.

A crash loses only unfinished answers, and no answer is written twice; an incomplete last line is cut off.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from outrider.data.answers import servers
from outrider.data.answers.dialogue import Dialogue, HashedConversation, hash_conversations
from outrider.data.answers.ledger import Ledger
from outrider.data.answers.sharing import ProcessGroup, merge_parts, part_path
from outrider.data.answers.store import (
    ANSWERS,
    Answer,
    checker,
    hash_number,
    iterate_answers,
    keep_hashes,
    manifest_for,
    put_in_order,
    read_manifest,
    with_known_weights,
    write_manifest,
)
from outrider.data.answers.writer import AnswerWriter, OnAnswer
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
from outrider.storage.json_text import parse_json
from outrider.storage.lock import held
from outrider.targets.protocol import Target
from outrider.targets.text.prompts import refuse_unembedded

WAVE = 4096
"""Maximum number of conversations in memory."""
SHARED_WAVE = 4
"""Conversations per slot that one of several processes claims at a time."""


def prepare(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: str | Path, config: Config,
    drafter: Drafter | None = None, on_answer: OnAnswer | None = None, skipped: Skipped | None = None,
    processes: ProcessGroup = ALONE, held_out: Collection[int] = (),
) -> Path:  # fmt: skip
    """Answer all conversations that are not answered yet; returns the file of answers.

    conversations: read once and spooled to a file, never all in memory.
    drafter: changes the speed, not the text.
    on_answer: called with the number of answered conversations and the newest answer.
    skipped: with `config.skip_bad`, collects the conversations that the chat template refuses.
    processes: the processes that share the prompts and all call this; the first one merges their answers.
    held_out: `hash_number` of prompts whose answers are never trained on; the n-gram hashes leave them out.
    Raises DataError if the folder has answers from another target, sampling setting or template; if another process
    writes to it; if the chat template refuses a conversation (with file and line); and if no server answers.
    """
    folder = Path(folder)
    path = folder / ANSWERS
    skipped = Skipped() if skipped is None else skipped
    on_answer = on_answer or (lambda *_: None)
    busy = DataError(f"another process is writing answers to {folder}; wait for it, or name another prepare.folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if processes.rank:
            _help(target, tokenizer, conversations, folder, config, drafter, on_answer, skipped, processes)
            return path
        with held(folder, busy), Ledger(folder) as ledger, ledger.reported(), Spool(folder) as spool:
            manifest = with_known_weights(manifest_for(target, tokenizer, config), read_manifest(folder))
            merge_parts(folder)  # left by the other processes of a stopped run
            _enter(ledger, spool, folder, tokenizer, target, conversations, config, manifest, skipped)
            processes.gather(None)  # now the others may claim prompts
            with path.open("a", encoding="utf-8") as file:
                done, is_shared = ledger.counts()["answered"], processes.count > 1
                writer = AnswerWriter(file, ledger, content_hash(manifest), done, on_answer, skipped, is_shared)
                _answer_all(target, tokenizer, _open(spool, ledger, is_shared), config, drafter, writer)
            processes.gather(None)  # all prompts are answered
            merge_parts(folder)
            put_in_order(path, ledger.position)
            if config.ngram_hashes:
                keep_hashes(folder, target, _prompts(spool, ledger, held_out), held_out)
    except OSError as error:
        why = f"{error.strerror or error}; the answers so far are kept; free some space and run again"
        raise DataError(f"can't write answers to {folder}: {why}") from error
    processes.gather(None)  # the others may read the file
    return path


def _help(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: Path, config: Config,
    drafter: Drafter | None, on_answer: OnAnswer, skipped: Skipped, processes: ProcessGroup,
) -> None:  # fmt: skip
    """In a process other than the first: answer prompts that no process has claimed, and write to a separate file."""
    processes.gather(None)
    if config.regenerate and not config.servers:  # otherwise one process is enough
        manifest = with_known_weights(manifest_for(target, tokenizer, config), read_manifest(folder))
        with Ledger(folder) as ledger, ledger.reported(), part_path(folder, processes.rank).open("a") as file:
            writer = AnswerWriter(file, ledger, content_hash(manifest), 0, on_answer, skipped, is_shared=True)
            prompts = hash_conversations(conversations, config)
            _answer_all(target, tokenizer, _open(prompts, ledger, is_shared=True), config, drafter, writer)
    processes.gather(None)  # all prompts are answered
    processes.gather(None)  # and merged


# ── setup ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _enter(
    ledger: Ledger, spool: Spool, folder: Path, tokenizer: Any, target: Target, conversations: Iterable[Conversation],
    config: Config, manifest: dict[str, Any], skipped: Skipped,
) -> None:  # fmt: skip
    """Enter the existing answers and this run's prompts into the ledger, and spool the prompts.

    Raises DataError for a prompt that the chat template refuses, unless `config.skip_bad`.
    """
    stored = read_manifest(folder)
    for _ in whole_lines(folder / ANSWERS):  # cuts off an incomplete last line
        pass
    with ledger.transaction():
        # if answers.json is lost, the answers' settings_hash is compared
        ledger.reconcile(_lines(folder, target.spec.vocabulary, checker(folder, manifest, stored or manifest)))
        for position, prompt in enumerate(hash_conversations(conversations, config)):
            spool.add(prompt)
            status = ledger.ask(prompt.prompt_hash, prompt.conversation.id, position)
            if status == "open" and config.regenerate:  # a source's own answers are checked when they are rendered
                _check(tokenizer, target.spec.vocabulary, prompt, config, ledger, skipped)
    if stored != manifest:
        write_manifest(folder, manifest)


def _lines(folder: Path, vocabulary: int, check: Callable[[int, Answer], None]) -> Iterator[tuple[str, str]]:
    """Prompt hash and id of every answer, each checked."""
    if (folder / ANSWERS).exists():
        for number, answer in enumerate(iterate_answers(folder / ANSWERS, vocabulary), 1):
            check(number, answer)
            yield answer.prompt_hash or "", str(answer.id)


def _check(
    tokenizer: Any, vocabulary: int, prompt: HashedConversation, config: Config, ledger: Ledger, skipped: Skipped
) -> None:  # fmt: skip
    try:
        check_template(tokenizer, prompt.conversation, config.enable_thinking)
        with at_place(prompt.conversation):
            refuse_unembedded((message["content"] for message in prompt.questions), tokenizer, vocabulary)
    except DataError as error:
        if not config.skip_bad:
            raise
        skipped.reasons.append(str(error))
        ledger.skip(prompt.prompt_hash, str(error))


def _open(prompts: Iterable[HashedConversation], ledger: Ledger, is_shared: bool) -> Iterator[HashedConversation]:
    """Prompts that are neither answered nor skipped; if processes share them, those that this process takes."""
    if is_shared:
        return (prompt for prompt in prompts if ledger.take(prompt.prompt_hash))
    return (prompt for prompt in prompts if ledger.status(prompt.prompt_hash) == "open")


def _prompts(prompts: Iterable[HashedConversation], ledger: Ledger, held_out: Collection[int]) -> Iterator[list[str]]:
    """The texts of each prompt that has an answer to train on."""
    for prompt in prompts:
        if hash_number(prompt.prompt_hash) not in held_out and ledger.status(prompt.prompt_hash) == "answered":
            yield [message["content"] for message in prompt.questions]


# ── the answers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _answer_all(
    target: Target,
    tokenizer: Any,
    unanswered: Iterator[HashedConversation],
    config: Config,
    drafter: Drafter | None,
    writer: AnswerWriter,
) -> None:
    if not config.regenerate:
        _keep_answers(target, tokenizer, unanswered, config, writer)
    elif config.servers:
        servers.answer_all(target, tokenizer, unanswered, config, writer)
    else:
        size = SHARED_WAVE * config.slots if writer.is_shared else WAVE
        while wave := list(islice(unanswered, size)):
            for answer in _answers(target, tokenizer, wave, config, drafter, writer):
                writer.answer(answer)


def _keep_answers(
    target: Target, tokenizer: Any, unanswered: Iterable[HashedConversation], config: Config, writer: AnswerWriter
) -> None:  # fmt: skip
    """Write the answers that the conversations already have, rendered."""
    for prompt in unanswered:
        conversation = prompt.conversation
        try:
            with at_place(conversation):
                texts = (message["content"] for message in conversation.messages)
                refuse_unembedded(texts, tokenizer, target.spec.vocabulary)
                tokens, learn, unstable = render(
                    tokenizer, conversation.messages, config.length, config.enable_thinking, conversation.tools
                )
        except DataError as error:
            if not config.skip_bad:
                raise
            writer.skipped.reasons.append(str(error))
            writer.skip(prompt.prompt_hash, str(error))
            continue
        writer.skipped.unstable += unstable
        if learn:
            writer.answer(Answer(conversation.id, tokens, learn, prompt_hash=prompt.prompt_hash))
        else:
            writer.skip(prompt.prompt_hash, f"it has no answer within {config.length} tokens")


def _answers(
    target: Target,
    tokenizer: Any,
    unanswered: list[HashedConversation],
    config: Config,
    drafter: Drafter | None,
    writer: AnswerWriter,
) -> Iterator[Answer]:
    """The target's answers, each as soon as its conversation is finished."""
    dialogues = [Dialogue(prompt) for prompt in unanswered]
    while dialogues:
        active = []
        for dialogue in dialogues:
            if dialogue.ask(tokenizer, config, target.spec.context):
                active.append(dialogue)
            else:
                writer.no_room(dialogue, config, target.spec.context)
        answers: list[list[int]] = [[] for _ in active]
        for progress in serve(target, [dialogue.request(config) for dialogue in active], drafter, slots=config.slots):
            dialogue, answer = active[progress.request], answers[progress.request]
            answer += progress.tokens
            if progress.finish_reason is not None:
                dialogue.add_answer(answer, target.decode(answer))
                if dialogue.is_over:
                    yield dialogue.answer(progress.finish_reason)
        dialogues = [dialogue for dialogue in active if not dialogue.is_over]


# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(folder: Path, hashes: np.ndarray) -> int:
    """How many of these prompts, [n] uint64, have an answer in the folder; another process may be adding more."""
    answered_hashes = array("Q")
    try:
        with (folder / ANSWERS).open("rb") as file:
            lines = (line for line in file if line.endswith(b"\n"))
            answered_hashes.extend(hash_number(parse_json(line).get("prompt_hash")) for line in lines)
    except (FileNotFoundError, ValueError, AttributeError):  # `prepare` names the damaged line
        return 0
    return int(np.isin(hashes, np.array(answered_hashes, np.uint64)).sum())
