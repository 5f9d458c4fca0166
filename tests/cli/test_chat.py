"""`outrider chat`: what it sends, saves and resumes, what it refuses, and what reaches the terminal."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from verbs import outrider_with

from outrider import generate
from outrider.cli import console, streamed
from outrider.cli.chat import LENGTH, Conversation, read_conversation
from outrider.errors import DataError
from outrider.generation import Piece, stream
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target


class Chatted(NamedTuple):
    code: int
    out: str
    err: str


class Chat:
    """Runs `outrider chat` on a pipe, in an empty folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys

    def __call__(self, lines: str, *words: object) -> Chatted:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        options = ("--target", str(self.folder), "--drafter", "ngram", "--max-new-tokens", "8", "--no-compile")
        code = outrider_with("chat", *map(str, words), *options)
        printed = self.capsys.readouterr()
        return Chatted(code, printed.out, " ".join(printed.err.split()))


@pytest.fixture
def chat(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Chat:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "out", Console(width=300))
    monkeypatch.setattr(console, "note", Console(stderr=True, width=300))
    return Chat(folder, monkeypatch, capsys)


def answered(folder: Path, *texts: str) -> list[dict[str, str]]:
    """The chat in which these texts are sent, by `generate`."""
    target, messages = load_target(folder, compile=False), list[dict[str, str]]()
    for text in texts:
        messages.append({"role": "user", "content": text})
        [answer] = generate(target, [messages], max_new_tokens=8)
        messages.append({"role": "assistant", "content": answer.text})
    return messages


def test_a_chat_remembers_and_a_saved_one_goes_on(folder: Path, chat: Chat, tmp_path: Path) -> None:
    """Catches answers that do not see the earlier messages, a system prompt or a marker that is lost, a resumed chat
    that differs from an unbroken one, and colours or a prompt sign in a pipe."""
    whole = answered(folder, "one <|end|>", "two", "three")
    first = chat("one <|end|>\n\ntwo\n", "talk.json")
    assert first.code == 0 and first.out == "".join(f"{whole[i]['content']}\n" for i in (1, 3)), first
    assert "8 tokens in" in first.err and "tokens per step" in first.err and "\x1b" not in first.out
    assert chat("three\n/quit\nfour\n", "talk.json").out == whole[5]["content"] + "\n"
    assert json.loads((tmp_path / "talk.json").read_text()) == {"messages": whole}
    assert not list(tmp_path.glob("*.part"))

    chat("one \\\nline\n/clear\nlater\n", "talk.json", "--system", "Be brief.")
    kept = read_conversation(tmp_path / "talk.json")
    assert kept[0] == {"role": "system", "content": "Be brief."} and kept[-2]["content"] == "one \nline"


def test_marks_in_a_users_text_are_text(talker: TransformersTarget) -> None:
    """Catches a user's <|end|> that ends their turn: the template's own three are the only ones."""
    end = talker.tokenizer.convert_tokens_to_ids("<|end|>")
    sent: list[list[int]] = []

    def recorded(prompts, **options):
        sent.append(talker.encode(prompts[0]))
        return stream(talker, prompts, **options)

    conversation = Conversation(recorded, lambda piece: None, [], None, {LENGTH: 3})
    conversation.reply("a<|end|><|user|>b")
    conversation.reply("c")
    assert [tokens.count(end) for tokens in sent] == [1, 3]


def test_commands_change_a_chat_and_errors_do_not_end_it(folder: Path, chat: Chat, tmp_path: Path) -> None:
    """Catches a wrong command that is sent, a wrong value that stays, a chat that ends at an error or takes the
    refused text into the conversation, and a file that /save overwrites."""
    (tmp_path / "other.json").write_text("mine")
    lines = ["/sett x", "/set temperature hot", "/set max_new_tokens 0", "/set heat 1", "/save", "/save other.json"]
    lines += [
        "x" * 300,
        "/set max_new_tokens 3",
        "/set",
        "/system Be brief.",
        "a",
        " /b",
        "/save mine.json",
        "/history",
    ]
    done = chat("\n".join(lines))
    for message in (
        "unknown command /sett; did you mean '/set'?", "temperature must be a number, got 'hot'",
        "max_new_tokens must be an integer above 0, got '0'", "unknown setting 'heat'", "/save needs a file",
        "other.json exists already", "leaves no room in the target's context of 256", "3 tokens in",
    ):  # fmt: skip
        assert message in done.err, (message, done.err)
    assert done.code == 0 and "max_new_tokens 3\n" in done.out and (tmp_path / "other.json").read_text() == "mine"
    saved = read_conversation(tmp_path / "mine.json")
    assert [message["content"] for message in saved if message["role"] != "assistant"] == ["Be brief.", "a", "/b"]
    assert done.out.endswith(f"assistant\n{saved[-1]['content']}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't read talk.json as a conversation"),
        ("[]", "talk.json is not a conversation"),
        ('{"messages": [], "id": 3}', "has id, which saving would lose"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "message 0 of talk.json"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "message 0 of talk.json"),
    ],
)
def test_what_is_no_conversation_is_refused(text: str, message: str, chat: Chat, tmp_path: Path) -> None:
    """Catches a file of something else that the first answer overwrites."""
    (tmp_path / "talk.json").write_text(text)
    done = chat("hello\n", "talk.json")
    assert (done.code, message in done.err, "Traceback" in done.err) == (1, True, False), done
    assert (tmp_path / "talk.json").read_text() == text
    with pytest.raises(DataError):
        read_conversation(tmp_path / "talk.json")
    assert "no such folder" in chat("hello\n", "nowhere/talk.json").err


def test_ctrl_c_stops_an_answer_and_keeps_it(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches Ctrl-C that ends the chat, an answer that is lost, and one that stops nothing."""
    pieces: list[Piece] = []

    def show(piece: Piece) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    conversation = Conversation(partial(stream, talker), show, [], tmp_path / "talk.json", {LENGTH: 9})
    assert conversation.reply("hello") and len(pieces) == 2
    text = "".join(piece.text for piece in pieces)
    assert read_conversation(tmp_path / "talk.json") == [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": text},
    ]  # fmt: skip
    assert conversation.reply("again") and len(pieces) == 2 + 9 and len(conversation.messages) == 4
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_terminal_gets_marks_and_no_control_characters(
    talker: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an answer that clears the screen or sets its title, and accepted tokens that look like the others."""
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, force_terminal=True, color_system="standard", width=80))
    text = "\x1b[2Jab\x9b\x07"
    streamed.show(Piece(0, talker.encode(text), text, len("\x1b[2Ja")), talker)
    shown = screen.getvalue()
    assert "\x1b[4;32m\\x1b[2Ja\x1b[0m" in shown and "b\\x9b\\x07" in shown
    assert not {"\x9b", "\x07"} & set(shown) and "\x1b[2J" not in shown


@pytest.mark.slow
def test_a_chat_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Catches what only a terminal shows: a prompt sign, Ctrl-C on an empty line or in an answer, and Ctrl-D."""
    main, side = pty.openpty()
    words = ["chat", "--target", str(folder), "--drafter", "ngram", "--no-compile", "--max-new-tokens", "200"]
    chat = subprocess.Popen(
        [sys.executable, "-m", "outrider", *words], stdin=side, stdout=side, stderr=side, cwd=tmp_path,
        start_new_session=True, env=os.environ | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(side)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 300
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([main], [], [], 1)[0]:
                seen += os.read(main, 1 << 16).decode(errors="replace")
        seen = seen.rpartition(text)[2]

    until("> ")
    os.kill(chat.pid, signal.SIGINT)
    until("leave with /quit or Ctrl-D")
    until("> ")
    os.write(main, b"hello\n")
    until("tokens per step")
    until("> ")
    os.write(main, b"\x04")
    assert chat.wait(60) == 0
