"""The command `specdec memory`: its flags, and what it prints."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.accounting.architecture import (
    CONFIG_FILE,
    SIZES,
    Architecture,
    NotUnderstood,
    architecture,
    models_beside,
    read_config,
)
from specdec.accounting.bounds import Bound, Setting, of_round, plain
from specdec.accounting.traffic import FORMATS, Stored
from specdec.arguments import checked
from specdec.parameters import Number, WholeNumber, nearest_hint
from specdec.planning.acceptance import parse_acceptance
from specdec.planning.command import MAX_TOKENS, typed
from specdec.planning.trees import chain, tokens_per_round

NUMBERS = (
    *SIZES,
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "sliding_window", "model_type"),
)
KNOWN = f"; names are {', '.join(NUMBERS)}"
DESCRIPTION = (
    "How many bytes a forward reads, and how many tokens a second a bandwidth allows, plainly and in rounds of K draft "
    "tokens. A forward over few tokens is bound by memory: weights are read once for all sessions and "
    "positions, each session's cache once. Arithmetic is not counted, so it is an upper bound. Only the model's "
    f"{CONFIG_FILE} is read; --set gives or replaces its numbers."
)

ConfigFolder = Callable[[str], Path]
Finish = Callable[[argparse.ArgumentParser, Callable[[argparse.Namespace], None]], None]


def add(commands: Any, finish: Finish, config_folder: ConfigFolder) -> None:
    """Add the command; `config_folder` finds the folder of a hub model's configuration."""
    memory = commands.add_parser("memory", help="count the bytes that bound the speed", description=DESCRIPTION)
    add = memory.add_argument
    positive, count = checked(Number(0, 1e9, excludes_low=True)), checked(WholeNumber(1, 1 << 24))
    add("model", nargs="?", metavar="DIR|ID", help="the target: a folder, or a hub id")
    add("--set", type=typed(_number), action="append", default=[], metavar="NAME=VALUE", help="a number of the target")
    add("--draft", metavar="DIR|ID", help="the draft model (default: one that reads nothing)")
    add("--dtype", choices=FORMATS, default="bfloat16", help="of the target's layers (default: bfloat16)")
    add("--draft-dtype", choices=FORMATS, default="bfloat16", help="of the draft's layers (default: bfloat16)")
    add("--cache-dtype", choices=FORMATS, default="bfloat16", help="of keys and values (default: bfloat16)")
    add("--bandwidth", required=True, type=positive, metavar="GB/S", help="of the memory, 10^9 bytes a second")
    add("--sessions", type=count, default=1, metavar="COUNT", help="at once (default: 1)")
    add("--context", type=count, default=1024, metavar="TOKENS", help="of each session (default: 1024)")
    add("--num-draft-tokens", type=checked(WholeNumber(0, MAX_TOKENS)), default=4, metavar="COUNT", help="(default: 4)")
    add(
        "--acceptance",
        type=typed(parse_acceptance),
        default="1",
        metavar="A[/A]",
        help="of a draft token after accepted ones, by depth (default: 1: all are accepted)",
    )
    add("--json", action="store_true", help="print JSON")
    finish(memory, lambda flags: run(flags, config_folder))


def _number(text: str) -> tuple[str, Any]:
    """Return a name of the configuration, and its value. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"is {text!r}; give NAME=VALUE, as hidden_size=4096")
    if name not in NUMBERS:
        hint = nearest_hint(name, NUMBERS, "the nearest name is")
        raise ValueError(f"is {text!r}{hint or KNOWN}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(flags: argparse.Namespace, config_folder: ConfigFolder) -> None:
    """Print what is read, and the bounds. Raises NotUnderstood."""
    target = Stored(_sizes(flags.model, config_folder, dict(flags.set)), flags.dtype, flags.cache_dtype)
    draft = Stored(_sizes(flags.draft, config_folder), flags.draft_dtype, flags.cache_dtype) if flags.draft else None
    setting = Setting(
        target=target,
        draft=draft,
        bandwidth=flags.bandwidth * 1e9,
        num_sessions=flags.sessions,
        context=flags.context,
        num_draft_tokens=flags.num_draft_tokens,
        tokens_per_round=tokens_per_round(chain(flags.acceptance, flags.num_draft_tokens)),
    )
    print(as_json(setting) if flags.json else "\n".join(lines(setting)))


def _sizes(name: str | None, config_folder: ConfigFolder, given: dict[str, Any] | None = None) -> Architecture:
    """Return the sizes of a model, some of them given."""
    config: dict[str, Any] = {}
    if name is not None:
        folder = Path(name).expanduser()
        if not folder.is_dir() and (beside := models_beside(name)):
            raise NotUnderstood(f"there is no folder {name}; beside it there are {', '.join(beside)}")
        config = read_config(folder if folder.is_dir() else config_folder(name))
    elif not given:
        raise NotUnderstood("name a model, or give its numbers with --set NAME=VALUE")
    return architecture({**config, **(given or {})})


# ---- what is printed


def as_json(setting: Setting) -> str:
    """Return all figures, bytes and tokens a second."""
    models = {"target": setting.target, "draft": setting.draft}
    facts = {name: _facts(model, setting.context) for name, model in models.items() if model}
    bounds = {"plain": plain(setting), "round": of_round(setting)}
    return json.dumps(facts | {name: asdict(bound) | {"total": bound.total} for name, bound in bounds.items()})


def _facts(model: Stored, context: int) -> dict[str, float]:
    return {
        "num_parameters": model.sizes.num_parameters,
        "weight_bytes": model.weight_bytes,
        "cache_bytes": model.cache_bytes(context),
    }


def lines(setting: Setting) -> Iterator[str]:
    """Yield the sentences and the table."""
    for name, model in (("target", setting.target), ("draft", setting.draft)):
        if model:
            facts = _facts(model, setting.context)
            yield (
                f"{name}: {facts['num_parameters']:,} parameters, {facts['weight_bytes']:,.0f} bytes of weights "
                f"({model.matrices}), {facts['cache_bytes']:,.0f} of cache ({model.cache}) a session"
            )
    yield from table(plain(setting), of_round(setting), setting.num_draft_tokens)
    yield from sentences(setting)


def table(one: Bound, several: Bound, num_draft_tokens: int) -> Iterator[str]:
    """Yield the bytes that are read, by what they are."""
    yield f"\n{'bytes read':<22}{'plain':>18}{f'round of K = {num_draft_tokens}':>20}"
    rows: Sequence[tuple[str, float, float]] = (
        ("layers", one.scored.layers, several.scored.layers),
        ("head", one.scored.head, several.scored.head),
        ("embedding", one.scored.embedding, several.scored.embedding),
        ("cache", one.scored.cache, several.scored.cache),
        ("draft", one.drafted_bytes, several.drafted_bytes),
        ("together", one.total, several.total),
    )
    for name, plain_bytes, round_bytes in rows:
        yield f"{name:<22}{plain_bytes:>18,.0f}{round_bytes:>20,.0f}"


def sentences(setting: Setting) -> Iterator[str]:
    """Yield the bounds."""
    one, several = plain(setting), of_round(setting)
    yield f"\nplain decoding: at most {one.tokens_per_s:,.1f} tokens/s of {setting.num_sessions} session(s) together"
    yield (
        f"rounds: at most {several.tokens_per_s:,.1f} tokens/s, with {setting.tokens_per_round:.2f} tokens per round: "
        f"{several.tokens_per_s / one.tokens_per_s:.2f} times plain decoding"
    )
