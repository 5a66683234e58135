"""Which tokens may follow a completion that must have a given form: JSON of a schema, a regular expression, a grammar.

llguidance compiles the form for a tokenizer and says which tokens are possible (Koo et al. 2024, "Automata-based
constraints for language model decoding"). Where only one text can follow, only its usual tokens are possible. What is
possible depends on the completion alone, so masking the target's logits before all other sampling parameters defines a
distribution like any other, and the acceptance rules leave it exact. A draft may be masked or not: a token that the
target finds impossible is never accepted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.errors import InvalidArgumentError
from specdec.exact.prefix import num_equal

NOTHING_FOLLOWS, DETAILS = "NoExtensionBias", "<non-verbose/>"  # llguidance's: why it stopped; what follows a cause
DEAD_END = "has led to a text that no token of this model can continue; change the grammar"
MAX_PROBLEM_CHARACTERS = 300
# of the parser, for which other sessions wait: a mask of an ambiguous grammar takes 0.6 s by llguidance's own limits,
# by these 0.02 s, and then the grammar is refused; an object with 150 optional properties is within them
LIMITS = LLParserLimits(max_items_in_row=600, step_max_items=2_500, step_lexer_fuel=100_000, verbose_errors=False)
MAX_COMPILED = 64  # grammars that are kept; one of a usual schema is compiled in a millisecond

Grammar = tuple[str, str]
"""A field of SamplingParams, and its value."""


class GrammarText:
    """A completion in the making, and the tokens that may follow it. Not thread-safe."""

    def __init__(self, field: str, matcher: LLMatcher, vocab_size: int, has_text: Callable[[int], bool]) -> None:
        """`vocab_size` is the number of the model's tokens; those that the tokenizer lacks are never allowed.

        `has_text` says of a token whether it is one of the tokenizer's, and no end of a text.
        """
        self._field, self._vocab_size, self._has_text = field, vocab_size, has_text
        self._unused, self._matcher = matcher, matcher.deep_copy()
        self._text = array("I")  # the completion, then draft tokens
        self._num_committed = 0
        self._num_matched = 0  # tokens of the text that fit, up to the first that does not

    def follow(self, start: int, tokens: Sequence[int], length: int, num_prompt_tokens: int) -> "GrammarText":
        """Hold the first `length` of `tokens`, of which the first `num_prompt_tokens` are the prompt; return self.

        Those before `start` are known to be as they were, as far as they are held. Raises as `allowed`.
        """
        known = min(max(0, min(start, length) - num_prompt_tokens), self._num_committed)
        self._move(known, tokens[num_prompt_tokens + known : max(length, num_prompt_tokens)])
        self._num_committed = len(self._text)
        return self

    def check_fits(self) -> None:
        """Raise InvalidArgumentError for a completion that no text of the form begins with."""
        if self._num_matched < self._num_committed:
            raise _refused(self._field, f"does not allow the session's text, from its token {self._num_matched} on")

    def allowed(self, path: Sequence[int] = ()) -> np.ndarray | None:
        """Return which tokens may follow the completion and the draft tokens of `path`, bool [vocab_size].

        None where the path does not fit, so that its target probability is 0, or has ended. Raises
        InvalidArgumentError for a grammar that takes too much work, or that has led to where nothing can follow.
        """
        self._move(self._num_committed, path)
        if self._num_matched < len(self._text):
            return None
        bits = self._matcher.compute_bitmask()
        self._check()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._vocab_size]
        if not allowed.any():
            raise _refused(self._field, DEAD_END)
        return np.pad(allowed, (0, self._vocab_size - len(allowed))).astype(np.bool_)

    def allowed_in_draft(
        self, start: int, tokens: Sequence[int], length: int, num_prompt_tokens: int, path: Sequence[int] = ()
    ) -> np.ndarray | None:
        """Follow a text, and return what is allowed after a draft; None instead of an error: it need not have the form.

        An error, from which a matcher never recovers, is forgotten: another draft may have the form.
        """
        try:
            return self.follow(start, tokens, length, num_prompt_tokens).allowed(path)
        except InvalidArgumentError:
            self._matcher, self._num_committed, self._num_matched = self._unused.deep_copy(), 0, 0
            del self._text[:]
            return None

    def forced(self, maximum: int) -> list[int]:
        """Return at most `maximum` tokens that spell the only text that can follow the completion; often none.

        Raises as `allowed`.
        """
        self._move(self._num_committed, ())
        if self._num_matched < len(self._text):
            return []
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens[:maximum]

    def _move(self, num_kept: int, tokens: Sequence[int]) -> None:
        """Hold the first `num_kept` tokens that are held, then `tokens`."""
        num_same = num_equal(self._text[num_kept:], tokens)
        num_kept, new = num_kept + num_same, tokens[num_same:]
        del self._text[num_kept:]
        if num_kept < self._num_matched:
            self._matcher.rollback(self._num_matched - num_kept)
            self._num_matched = num_kept
        self._text.extend(new)
        if new and self._num_matched == num_kept:
            # a token that the tokenizer lacks is an error for llguidance, and it may not take an end back
            self._num_matched += self._matcher.try_consume_tokens(list(takewhile(self._has_text, new)))
        self._check()

    def _check(self) -> None:
        _check(self._field, self._matcher)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Not thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` are what a text ends with, at least one. Raises ValueError for an unsuitable tokenizer."""
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        self._eos_token_ids = frozenset(eos_token_ids)
        self._compiled = OrderedDict[Grammar, LLMatcher]()  # least recently used first

    def __contains__(self, grammar: Grammar) -> bool:
        """Return whether it is compiled."""
        return grammar in self._compiled

    def text(self, grammar: Grammar) -> GrammarText:
        """Return an empty completion that must have the form. Raises InvalidArgumentError for a wrong grammar."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self.compile(grammar)
        self._compiled[grammar] = matcher
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return GrammarText(grammar[0], matcher, self._vocab_size, self._has_text)

    def _has_text(self, token: int) -> bool:
        return token < self._tokenizer.vocab_size and token not in self._eos_token_ids

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher, which is not kept. Raises InvalidArgumentError for a wrong grammar."""
        field, value = grammar
        try:
            source = _source(field, value)
        except ValueError as error:
            raise _refused(field, f"is wrong: {error}") from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refused(field, f"is wrong: {matcher.get_error()}")
        _try_first_token(field, matcher.deep_copy())
        return matcher


def _try_first_token(field: str, matcher: LLMatcher) -> None:
    """Raise InvalidArgumentError where no text can begin, or where a token cannot be taken back, as drafts are."""
    bits = matcher.compute_bitmask()
    _check(field, matcher)
    first = int(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").argmax())
    matcher.try_consume_tokens([first])
    _check(field, matcher)
    matcher.rollback(1)
    if matcher.is_error():
        raise _refused(field, f"is wrong: {matcher.get_error().partition(DETAILS)[0]}")


def _check(field: str, matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    cause = matcher.get_error().partition(DETAILS)[0]
    raise _refused(field, DEAD_END if NOTHING_FOLLOWS in cause else f"takes too much work: {cause}")


def _source(field: str, value: str) -> str:
    """Return a grammar in llguidance's own form."""
    if field == "json_schema":
        # one line, as Python's json.dumps writes it: whitespace without end would be a valid text that never ends
        return LLMatcher.grammar_from_json_schema(
            value, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    return LLMatcher.grammar_from_regex(value) if field == "regex" else LLMatcher.grammar_from_lark(value)


def _refused(field: str, problem: str) -> InvalidArgumentError:
    words = " ".join(problem.split())
    if len(words) > MAX_PROBLEM_CHARACTERS:
        words = f"{words[:MAX_PROBLEM_CHARACTERS]}..."
    return InvalidArgumentError({f"sampling.{field}": words})
