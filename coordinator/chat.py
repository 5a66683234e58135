"""Chat messages to text, by the model's own template, rendered as transformers does but without torch."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import InvalidArgumentError

MAX_RENDERED_CHARACTERS = 4 << 20
MAX_RENDER_S = 2.0
MAX_REASON_CHARACTERS = 128  # of what a template says when it refuses: it may quote a message
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)  # of the template that renders now


class GenerationMarks(Extension):
    """Reads past {% generation %}, by which templates mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own way

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates must end in time; each lookup and call checks the time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look an attribute up."""
        _check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up."""
        _check_time()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template."""
        _check_time()
        return super().call(context, obj, *args, **kwargs)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateError(f"it takes longer than {MAX_RENDER_S:g} s; send fewer or shorter messages")


class ChatTemplate:
    """One model's chat template."""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        extensions = [loopcontrols, GenerationMarks]
        environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._template = environment.from_string(template)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return the prompt, ready for the answer. Raises InvalidArgumentError if the template refuses it."""
        entries = [{"role": role, "content": content} for role, content in messages]
        try:
            # templates ask `tools is not none`: what is not given is None, as in transformers
            given = {"messages": entries, "tools": None, "documents": None, "add_generation_prompt": True}
            return _joined(self._template.generate(**self._special_tokens, **given))
        except InvalidArgumentError:
            raise
        except (TemplateError, TypeError, ValueError) as error:
            problem = str(error)[:MAX_REASON_CHARACTERS]
            raise InvalidArgumentError({"chat": f"is refused by the model's chat template: {problem!r}"}) from None


def _joined(pieces: Iterator[str]) -> str:
    """Join what a template gives, within the limits of time and size. Raises TemplateError, InvalidArgumentError."""
    _deadline.set(time.monotonic() + MAX_RENDER_S)
    texts, size = [], 0
    for piece in pieces:
        _check_time()
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            problem = f"renders to more than {MAX_RENDERED_CHARACTERS} characters"
            raise InvalidArgumentError({"chat": f"{problem}; send fewer or shorter messages"})
        texts.append(piece)
    return "".join(texts)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the template of the tokenizer in this folder, or None if it has none."""
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.exists() else _default_template(config.get("chat_template"))
    if not template:
        return None
    special = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    try:
        return ChatTemplate(template, special)
    except TemplateError as error:
        raise ValueError(f"the chat template in {folder} cannot be read: {error}") from error


def _default_template(template: Any) -> str | None:
    """Some configurations name several templates."""
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return str(template) if template else None


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content
