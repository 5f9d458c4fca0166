"""`outrider chat`: a conversation in the terminal, with accepted draft tokens marked."""

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console, streamed
from outrider.cli.options import TARGET_OPTIONS, DrafterName, DrafterSettings, Fields, with_options
from outrider.config import nearest, override
from outrider.errors import ConfigError, DataError, OutriderError, first_line
from outrider.generation import Piece, stream
from outrider.runs.file import TargetConfig
from outrider.sampling.settings import NUMBERS, Sampling
from outrider.serve.config import Config as ServeConfig
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text
from outrider.targets.load import work_for_first

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
FIELDS = {"role", "content"}
LENGTH = "max_new_tokens"
SETTINGS = (LENGTH, *(name for name in NUMBERS if name != "logprobs"))
"""What `/set` changes."""


@with_options
def chat(
    file: Annotated[
        Path | None,
        typer.Argument(help="The conversation: continued if the file exists, and saved to it after every answer."),
    ] = None,
    *,
    target: Annotated[TargetConfig, Fields(TargetConfig, TARGET_OPTIONS, defaults={"name": "smollm2"})],
    drafter: DrafterName = None,
    settings: DrafterSettings = None,
    system: Annotated[str | None, typer.Option(help="System prompt; replaces that of a saved conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; by default the model's own settings apply.")
    ] = None,
    seed: int | None = None,
    serving: Annotated[ServeConfig, Fields(ServeConfig, "policy verification allow_lossy")],
) -> None:
    """Chat with the target.  Accepted draft tokens are underlined in green.  `/help` lists the commands."""
    work_for_first(target.tensor_parallel)  # the others read and print nothing
    if file is not None and not file.absolute().parent.is_dir():
        raise DataError(f"can't write {file}: no such folder; name a file in a folder that exists")
    messages = [] if file is None or not file.exists() else read_conversation(file)
    options = {"temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in options.items() if value is not None}
    loaded, built = streamed.load(target, drafter, settings)
    answer = partial(
        stream, loaded, drafter=built,
        policy=serving.policy, verification=serving.verification, allow_lossy=serving.allow_lossy,
    )  # fmt: skip
    show = partial(streamed.show, target=loaded)
    conversation = Conversation(answer, show, messages, file, {LENGTH: max_new_tokens, **sampling})
    if system is not None:
        conversation.set_system(system)
    loaded.encode([*conversation.messages, {"role": "user", "content": "."}])  # raises for a target that can't chat
    if messages:
        console.remark(f"{file}: {len(messages)} messages; /history shows them", "dim")
    if sys.stdin.isatty():
        console.remark(f"{loaded.spec.name}, drafter {drafter or 'none'}; /help lists the commands", "dim")
    for line in _lines():
        if not conversation.reply(line):
            break


class Conversation:
    """The messages of a chat and the commands that change them."""

    def __init__(
        self, stream: Callable[..., Iterator[Piece]], show: Callable[[Piece], None], messages: list[Message],
        file: Path | None, settings: dict[str, Any],
    ):  # fmt: skip
        """file: where the conversation is saved after every answer.  settings: by their names in `SETTINGS`."""
        self.stream, self.show, self.messages, self.file = stream, show, messages, file
        self.settings = settings

    def reply(self, line: str) -> bool:
        """Answer a line, or run its command.  False ends the chat; errors are printed and the chat continues."""
        try:
            if line.startswith("/"):
                name, _, rest = line.rstrip().partition(" ")
                if name not in COMMANDS:
                    raise ConfigError(f"unknown command {name}{nearest(name, COMMANDS)}; a space before / sends it")
                COMMANDS[name][0](self, rest.strip())
                return name != "/quit"
            if line.strip():
                self._answer(line.strip())
        except OutriderError as error:
            console.fail(str(error))
        return True

    def _answer(self, text: str) -> None:
        """Stream the answer to this text.  Both are added to the conversation, unless there is no answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []

        def show(piece: Piece) -> None:
            answer.append(piece.text)
            self.show(piece)

        most = self.settings[LENGTH]
        with _stoppable() as is_stopped:
            pieces = self.stream([messages], max_new_tokens=most, sampling=_sampling(self.settings))
            pace = streamed.timed(_until(is_stopped, pieces), show)
        console.out.print()
        notes = [streamed.in_words(pace)]
        if is_stopped():
            notes.append("stopped")
        elif pace.tokens == most:
            notes.append(f"cut off at {most} tokens: /set {LENGTH} {2 * most} allows more")
        console.remark("; ".join(notes), "dim")
        if pace.tokens:
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
            self._save()

    def _save(self) -> None:
        if self.file is not None:
            try:
                with replacing(self.file) as part:
                    part.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n", "utf-8")
            except OSError as error:
                raise DataError(f"can't write {self.file}: {error.strerror}; /save FILE names another file") from None

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def help(self, _: str) -> None:
        """List the commands"""
        rows = console.table("command", "what it does")
        for name, (command, arguments) in COMMANDS.items():
            rows.add_row(f"{name} {arguments}", command.__doc__ or "")
        console.show(rows)
        console.say(r"Ctrl-C stops an answer, Ctrl-D leaves.  A line that ends with \ continues on the next one.")

    def set(self, text: str) -> None:
        """Change a setting, or show all"""
        if not text:
            for name, value in self.settings.items():
                console.say(f"{name} {value}")
            return
        name, _, value = text.partition(" ")
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, SETTINGS)}")
        settings = override(self.settings, [f"{name}={value}"])
        if not (type(most := settings[LENGTH]) is int and most > 0):
            raise ConfigError(f"{LENGTH} must be an integer above 0, got {value!r}")
        _sampling(settings)
        self.settings = settings

    def set_system(self, text: str) -> None:
        """Set the system prompt; without TEXT, remove it"""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def history(self, _: str) -> None:
        """Show the conversation"""
        for message in self.messages:
            console.say(message["role"], "bold")
            console.say(message["content"])

    def clear(self, _: str) -> None:
        """Start a new conversation with the same system prompt"""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        if self.file is not None:
            console.remark(f"{self.file} keeps the old conversation; /save FILE saves the new one", "dim")
        self.file = None

    def save(self, text: str) -> None:
        """Save the conversation now and after every answer"""
        file = Path(text).expanduser() if text else self.file
        if file is None:
            raise ConfigError("/save needs a file; name one, such as /save talk.json")
        if file != self.file and file.exists():
            raise ConfigError(f"{file} exists already; name a new file")
        before, self.file = self.file, file
        try:
            self._save()
        except DataError:
            self.file = before
            raise
        console.remark(f"saved to {file}; `outrider chat {file}` continues it", "dim")

    def quit(self, _: str) -> None:
        """Leave"""


COMMANDS: dict[str, tuple[Callable[[Conversation, str], None], str]] = {
    "/help": (Conversation.help, ""),
    "/set": (Conversation.set, "[NAME VALUE]"),
    "/system": (Conversation.set_system, "[TEXT]"),
    "/history": (Conversation.history, ""),
    "/clear": (Conversation.clear, ""),
    "/save": (Conversation.save, "[FILE]"),
    "/quit": (Conversation.quit, ""),
}


def read_conversation(file: Path) -> list[Message]:
    """The messages of a saved conversation.  Raises DataError for anything else."""
    try:
        conversation = parse_json(whole_text(file))
    except (OSError, ValueError) as error:
        raise DataError(
            f"can't read {file} as a conversation: {first_line(error)}; name a new file, or one saved by outrider chat"
        ) from None
    form = '{"messages": [{"role": "user", "content": "a text"}, ...]}'
    if not (isinstance(conversation, dict) and isinstance(messages := conversation.get("messages"), list)):
        raise DataError(f"{file} is not a conversation; expected {form}")
    if unknown := sorted(conversation.keys() - {"messages"}):
        raise DataError(f"{file} has {', '.join(unknown)}, which saving would lose; expected {form}")
    for number, message in enumerate(messages):
        is_text = isinstance(message, dict) and message.keys() == FIELDS and isinstance(message["content"], str)
        if not is_text or message["role"] not in ROLES:
            raise DataError(f"message {number} of {file} is {str(message)[:80]}; expected {form}")
    return messages


def _sampling(settings: dict[str, Any]) -> Sampling | None:
    """None without sampling settings: the model's own generation_config applies."""
    sampling = {name: value for name, value in settings.items() if name != LENGTH}
    return Sampling(**sampling) if sampling else None


def _lines() -> Iterator[str]:
    """Lines of standard input, joined where one ends with a backslash; edited by readline on a terminal."""
    is_terminal = sys.stdin.isatty() and console.out.is_terminal
    if is_terminal:
        import readline  # noqa: F401  # input() uses it; absent on some systems

    text = ""
    while True:
        try:
            line = input("" if not is_terminal else "... " if text else "> ")
        except EOFError:
            if is_terminal:
                console.out.print()
            return
        except KeyboardInterrupt:
            console.remark("\nleave with /quit or Ctrl-D", "dim")
            text = ""
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not valid UTF-8: {error}; convert it") from None
        text += re.sub(r"\\$", "\n", line)
        if not text.endswith("\n"):
            yield text
            text = ""


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed; the current step finishes first.  The second Ctrl-C raises
    KeyboardInterrupt."""
    stop = threading.Event()

    def handle(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _until(is_stopped: Callable[[], bool], pieces: Iterator[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        if is_stopped():
            return
