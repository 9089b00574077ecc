"""What `dragoman explain` is given to read: text, a file, a conversation, standard input, or vectors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.cli.common import decode_text, read_text_file
from dragoman.errors import ConfigError, TextError

MAX_MESSAGES = 1_000


@dataclass(frozen=True)
class ExplainInput:
    """What is to be read: kind is text, file, stdin, chat or vectors."""

    kind: str
    text: str = ""
    path: Path = Path()


def choose_input(
    text: str | None, file: Path | None, chat: Path | None, vectors: Path | None
) -> ExplainInput:
    """The one input that was given; standard input where there is none.

    Raises:
        ConfigError: more than one, or none and nobody piping.
    """
    candidates = (
        (text, ExplainInput("stdin") if text == "-" else ExplainInput("text", text=text or "")),
        (file, ExplainInput("file", path=file or Path())),
        (chat, ExplainInput("chat", path=chat or Path())),
        (vectors, ExplainInput("vectors", path=vectors or Path())),
    )
    given = [source for value, source in candidates if value is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{len(given)} inputs were given: {', '.join(item.kind for item in given)}",
            expected="one of TEXT, --file, --chat, --vectors, or standard input",
            consequence="all but one would silently be ignored",
            remedy="give one",
        )
    if given:
        return given[0]
    if sys.stdin.isatty():
        raise ConfigError(
            "nothing to read was given",
            expected="a text, --file, --chat, --vectors, or text on standard input",
            consequence="the command would wait for typing that nobody announced",
            remedy='for example: dragoman explain "The capital of France is Paris."',
        )
    return ExplainInput("stdin")


def read_input(source: ExplainInput) -> Any:
    """The text, the messages, or nothing for vectors (they are read where they are used).

    Raises:
        TextError: an empty text, one that is not UTF-8, or messages in another form.
    """
    if source.kind == "vectors":
        return None
    if source.kind == "chat":
        return _read_messages(source.path)
    if source.kind == "file":
        text = read_text_file(source.path)
    elif source.kind == "stdin":
        text = decode_text(sys.stdin.buffer.read(), "standard input")
    else:
        # A shell hands bytes that are no UTF-8 over as lone surrogates, which no tokenizer takes.
        text = decode_text(source.text.encode("utf-8", "surrogateescape"), "the text")
    if not text.strip():
        raise TextError(
            "the text is empty",
            expected="at least one word",
            consequence="there would be no token to read",
            remedy="pass a text",
        )
    return text


def _read_messages(path: Path) -> list[dict[str, str]]:
    import orjson

    try:
        messages: Any = orjson.loads(read_text_file(path, "--chat"))
    except orjson.JSONDecodeError as error:
        raise _chat_error(path, f"is not JSON ({error})") from error
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise _chat_error(path, "is no list of messages" if messages else "holds no messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise _chat_error(path, f"has a message {number} without a text role and a text content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _chat_error(path: Path, what: str) -> TextError:
    return TextError(
        f"--chat {path} {what}",
        expected='a JSON list such as [{"role": "user", "content": "Hello"}]',
        consequence="the model would read another conversation than was meant",
        remedy="correct the file",
    )
