"""Command lines with argparse: one sentence for what is wrong, with the nearest valid name; flags from the table.

Errors of a request get the names of the flags that mend them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from specdec.errors import InvalidArgumentError
from specdec.parameters import Kind, Parameter, Switch, nearest_hint
from specdec.types import SAMPLING_PARAMETERS, SamplingParams

FAILED, WRONG_USAGE = 1, 2  # exit codes


class CommandError(Exception):
    """A command cannot continue. The message is for the user."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence with the nearest valid flag or command, and exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100), **settings
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check names first: argparse reports what an unknown flag leaves missing instead of the flag."""
        self._check_names(list(sys.argv[1:] if args is None else args))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence."""
        # argparse's "argument --top-k: is ..." reads as a sentence without its first word
        sentence = message.removeprefix("argument ").replace(": is ", " is ", 1)
        if sentence.startswith("unrecognized arguments"):
            sentence += "; quotes keep a text with spaces together"
        self.exit(WRONG_USAGE, f"specdec: {sentence} ({self.prog} --help)\n")

    def _check_names(self, given: Sequence[str]) -> None:
        commands = [
            name for action in self._actions if action.nargs == argparse.PARSER for name in action.choices or ()
        ]
        for word in given:
            name = word.split("=")[0]
            if word == "--":
                return
            if name.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown flag {name}{nearest_hint(name, list(self._option_string_actions))}")
            if commands and not word.startswith("-"):
                if word not in commands:
                    self.error(
                        f"unknown command {word}{nearest_hint(word, commands)}; commands are {', '.join(commands)}"
                    )
                return  # the rest is the command's


# fields that are words of a command, and no flags
WORDS = {"session_id": "ID", "text": "PROMPT", "prompt": "PROMPT", "chat": "PROMPT", "chat.messages": "PROMPT"}


def with_flags(error: InvalidArgumentError, flags: argparse.Namespace) -> str:
    """Return an error's sentence with a command's flags and words in place of the fields of its request."""
    sentence = error.message
    for field in error.violations:
        name = WORDS.get(field) or flag_of(field.rpartition(".")[2], flags)
        sentence = sentence.replace(f"{field} ", f"{name} ", 1) if name else sentence
    return sentence


def flag_of(name: str, flags: argparse.Namespace) -> str | None:
    """Return the flag that sets a field, if the command has one."""
    parameter = SAMPLING_PARAMETERS.get(name)
    own_name = parameter.flag if parameter else None
    return (own_name or f"--{name.replace('_', '-')}") if name in flags else None


def checked(kind: Kind) -> Callable[[str], Any]:
    """Return an argparse type: it parses one value and checks it against the kind."""

    def parse(text: str) -> Any:
        try:
            value = kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if problem := kind.problem(kind.join([value])):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of SamplingParams, grouped and described as its metadata say."""
    groups: dict[str, Any] = {}
    for entry in fields(SamplingParams):
        parameter: Parameter = entry.metadata["parameter"]
        group = groups.get(parameter.group) or parser.add_argument_group(parameter.group)
        groups[parameter.group] = group
        flag = parameter.flag or f"--{entry.name.replace('_', '-')}"
        if isinstance(parameter.kind, Switch):
            group.add_argument(flag, dest=entry.name, action="store_true", help=parameter.help)
            continue
        default = None if parameter.kind.is_list else entry.default
        group.add_argument(
            flag,
            dest=entry.name,
            action="append" if parameter.kind.is_list else "store",
            type=checked(parameter.kind),
            default=default,
            metavar=parameter.kind.metavar,
            help=parameter.help + ("" if default is None else f" (default: {default:g})"),
        )


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that the flags give."""
    given = {name: getattr(options, name) for name in SAMPLING_PARAMETERS if getattr(options, name) is not None}
    kinds = {name: parameter.kind for name, parameter in SAMPLING_PARAMETERS.items()}
    return SamplingParams(
        **{name: kinds[name].join(value) if kinds[name].is_list else value for name, value in given.items()}
    )
