"""What forwards cost, as measured, and how many prompt tokens a forward may read beside sessions that decode.

A session that decodes comes back for its next round after an absence: drafting, the coordinator, the network. Alone,
its rounds are an absence and a forward apart. A prompt may double that at most: the time that prompts take in the
forward before its round and in its own is limited to what one such gap takes. Where more prompts are being read than
sessions decode, they may take so many times more: all get the same share of the engine, and many that came together
soon decode together, in forwards that cost little more than one session's. Times come as arguments, in seconds.

Deep in a long text even one token costs more than that, as all of the cache before it is read. Then a piece is long
enough to be worth that, and the rounds after it go without prompts until they have made up for it: the mean gap still
doubles at most, and so does the median.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

SMOOTHING = 0.2  # weight of the latest measurement
FORGETTING = 0.9  # of earlier forwards over texts of about the same length in the fit, a forward
MAX_ABSENCE_S = 1.0  # a session that is away for longer is not expected back
LATE_FACTOR = 2.0  # of an absence: it varies
UNMEASURED_TOKENS = 64  # of prompts beside decoding sessions, before anything was measured
MIN_PIECE_TOKENS = 1  # whatever they cost: a wrong estimate must not stop prompts, which are what corrects it
SHARE = 0.9  # of a gap that prompts may take: what is measured varies
LEAST_TOKEN_S = 1e-9  # so that prompts differ in length before any was measured
# a piece reads what is cached before it once: that takes as long as for so many of its tokens to attend to it, as
# measured on CPUs in float32 (7 to 9), where memory is slow and arithmetic is fast
PASS_TOKENS = 8
MOST_TIMES_LONGER = 4.0  # than expected, that a measurement counts for
MAX_READING_S = 0.1  # of prompts alone: whatever comes meanwhile waits no longer, and a forward's fixed cost is less


@dataclass(slots=True)
class Smoothed:
    """A value that follows its measurements."""

    value: float | None = None

    def observe(self, measured: float) -> None:
        """Move towards a measurement."""
        self.value = measured if self.value is None else self.value + SMOOTHING * (measured - self.value)


@dataclass(slots=True)
class _Sums:
    """What least squares need of some measurements."""

    tokens_tokens: float = 0.0
    tokens_pairs: float = 0.0
    pairs_pairs: float = 0.0
    tokens_s: float = 0.0
    pairs_s: float = 0.0

    def observe(self, num_tokens: int, num_pairs: float, elapsed_s: float) -> None:
        """Add a measurement; earlier ones count for less."""
        self.tokens_tokens = FORGETTING * self.tokens_tokens + num_tokens * num_tokens
        self.tokens_pairs = FORGETTING * self.tokens_pairs + num_tokens * num_pairs
        self.pairs_pairs = FORGETTING * self.pairs_pairs + num_pairs * num_pairs
        self.tokens_s = FORGETTING * self.tokens_s + num_tokens * elapsed_s
        self.pairs_s = FORGETTING * self.pairs_s + num_pairs * elapsed_s

    def add(self, other: "_Sums") -> None:
        """Add other measurements."""
        self.tokens_tokens += other.tokens_tokens
        self.tokens_pairs += other.tokens_pairs
        self.pairs_pairs += other.pairs_pairs
        self.tokens_s += other.tokens_s
        self.pairs_s += other.pairs_s


@dataclass(slots=True)
class ReadingCost:
    """Seconds that prompt tokens take: so much a token, and so much for each token that a token attends to.

    Least squares over the latest forwards, both coefficients at least 0. Texts of different lengths are remembered
    apart: the hundred pieces of a long one must not wipe out what a token at a text's beginning costs.
    """

    _sums: dict[int, _Sums] = field(default_factory=dict)  # by the bits of the number of tokens attended to
    each_s: float = 0.0  # a token
    pair_s: float = 0.0  # and each token that it attends to

    @property
    def is_measured(self) -> bool:
        """Whether there was a measurement."""
        return bool(self._sums)

    def observe(self, num_tokens: int, num_pairs: float, elapsed_s: float) -> None:
        """Take note that so many tokens, attending to `num_pairs` tokens in all, took so long."""
        expected_s = self.each_s * num_tokens + self.pair_s * num_pairs
        if expected_s > 0:  # a machine that stood still for seconds says little of what tokens cost
            elapsed_s = min(elapsed_s, MOST_TIMES_LONGER * expected_s)
        bits = int(num_pairs / num_tokens).bit_length()
        self._sums.setdefault(bits, _Sums()).observe(num_tokens, num_pairs, elapsed_s)
        self.each_s, self.pair_s = self._coefficients()

    def token_s(self, past: int) -> float:
        """Return the seconds of a token that attends to `past` tokens; 0 before the first measurement."""
        return self.each_s + self.pair_s * past

    def _coefficients(self) -> tuple[float, float]:
        sums = _Sums()
        for each in self._sums.values():
            sums.add(each)
        determinant = sums.tokens_tokens * sums.pairs_pairs - sums.tokens_pairs**2
        alone = sums.tokens_s / sums.tokens_tokens, 0.0
        if determinant <= 1e-6 * sums.tokens_tokens * sums.pairs_pairs:
            return alone
        token_s = (sums.tokens_s * sums.pairs_pairs - sums.pairs_s * sums.tokens_pairs) / determinant
        pair_s = (sums.pairs_s * sums.tokens_tokens - sums.tokens_s * sums.tokens_pairs) / determinant
        if pair_s < 0:
            return alone
        return (token_s, pair_s) if token_s >= 0 else (0.0, sums.pairs_s / sums.pairs_pairs)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt in a forward."""

    num_tokens: int
    past: int  # cached tokens before it

    @property
    def num_pairs(self) -> float:
        """Tokens that its tokens attend to, in all, and what reading them costs beside."""
        return self.num_tokens * (self.past + self.num_tokens / 2) + PASS_TOKENS * self.past


@dataclass(slots=True)
class Pace:
    """The measured costs, and the sessions that are expected back.

    Small pieces cost more a token than large ones, so those beside rounds are measured by themselves.
    """

    _alone: ReadingCost = field(default_factory=ReadingCost)
    _beside: ReadingCost = field(default_factory=ReadingCost)
    _decoding_s: dict[int, Smoothed] = field(default_factory=dict)  # of a forward, by the bits of its number of tokens
    _absence_s: Smoothed = field(default_factory=Smoothed)
    _left_s: dict[str, float] = field(default_factory=dict)  # when each session's last round ended
    _last_end_s: float = 0.0  # of the last forward
    _last_reading_s: float = 0.0  # what prompts took of it
    _granted_s: float | None = None  # to prompts beside rounds, in the forward in progress
    _debt_s: float = 0.0  # that prompts took beside rounds, and were not granted

    # --- what is measured

    def observe_forward(self, num_decoding: int, pieces: Iterable[Piece], elapsed_s: float, end_s: float) -> None:
        """Take note of a forward over `num_decoding` tokens of sessions that decode, and pieces of prompts."""
        pieces = list(pieces)
        num_tokens, num_pairs = sum(piece.num_tokens for piece in pieces), sum(piece.num_pairs for piece in pieces)
        self._last_end_s = end_s
        if not num_tokens:
            self._decoding_s.setdefault(num_decoding.bit_length(), Smoothed()).observe(elapsed_s)
            self._last_reading_s = 0.0
            self._settle(0.0)
            return
        decoding_s = (self.decoding_s(num_decoding) if num_decoding else self._least_s()) or 0.0
        reading_s = max(0.0, elapsed_s - decoding_s)
        (self._beside if num_decoding else self._alone).observe(num_tokens, num_pairs, reading_s)
        self._last_reading_s = reading_s if num_decoding else elapsed_s
        self._settle(reading_s)

    def _settle(self, reading_s: float) -> None:
        """Take note of what prompts took of what they were granted beside rounds."""
        if self._granted_s is not None:
            self._debt_s = min(max(0.0, self._debt_s + reading_s - self._granted_s), MAX_READING_S)

    def observe_arrival(self, key: str, arrived_s: float) -> None:
        """Take note that a session's round has arrived."""
        left_s = self._left_s.pop(key, None)
        if left_s is not None and arrived_s - left_s < MAX_ABSENCE_S:
            self._absence_s.observe(max(0.0, arrived_s - left_s))

    def observe_end(self, key: str, end_s: float) -> None:
        """Take note that a session's round has ended; it is expected back."""
        self._left_s[key] = end_s

    def forget(self, key: str) -> None:
        """Do not expect a session back."""
        self._left_s.pop(key, None)

    # --- what follows

    @property
    def absence_s(self) -> float:
        """How long sessions are away between two rounds; 0 before the first has come back."""
        return self._absence_s.value or 0.0

    def decoding_s(self, num_tokens: int) -> float | None:
        """Return what a forward of so many tokens, without prompts, takes; None before any was measured."""
        wanted = num_tokens.bit_length()
        nearest = min(self._decoding_s, key=lambda bits: abs(bits - wanted), default=None)
        return None if nearest is None else self._decoding_s[nearest].value

    def _least_s(self) -> float | None:
        return min((cost.value or 0.0 for cost in self._decoding_s.values()), default=None)

    def expected_until_s(self, now_s: float) -> float | None:
        """Return until when a session that decodes is expected back; None where none is."""
        late_s = LATE_FACTOR * self.absence_s
        self._left_s = {key: left_s for key, left_s in self._left_s.items() if now_s < left_s + MAX_ABSENCE_S}
        latest = max(self._left_s.values(), default=None)
        return latest + late_s if latest is not None and now_s < latest + late_s else None

    def hold_s(self, now_s: float) -> float:
        """Return how long prompts should wait for sessions that decode, to share a forward with them.

        A forward costs about as much for a few tokens as for one. So a forward of prompts alone, short enough to make
        nobody wait, would read next to nothing; unless the sessions are away for longer than a forward takes.
        """
        until_s, least_s = self.expected_until_s(now_s), self._least_s()
        if until_s is None or least_s is None or self.absence_s > least_s:
            return 0.0
        return max(0.0, until_s - now_s)

    def allowance_s(
        self, num_decoding: int, arrived_s: Iterable[float | None], now_s: float, num_prompts: int = 1
    ) -> float | None:
        """Return how long `num_prompts` prompts may take in the next forward; None before anything was measured.

        `arrived_s` has, for each session that decodes in it, when its round arrived, None if that had a forward before.
        """
        arrivals = list(arrived_s)
        self._granted_s = None
        if not arrivals:
            return self._allowance_alone_s(now_s)
        forward_s = self.decoding_s(num_decoding)
        if forward_s is None or not (self._beside.is_measured or self._alone.is_measured):
            return None
        least_s = min(self._allowance_beside_s(forward_s, each) for each in arrivals)
        self._granted_s = max(least_s, min(least_s * num_prompts / len(arrivals), MAX_READING_S))
        return self._granted_s if self._debt_s <= 0 else 0.0

    def _allowance_beside_s(self, forward_s: float, arrived_s: float | None) -> float:
        if arrived_s is None:
            return SHARE * forward_s
        waited_s = min(self._last_reading_s, max(0.0, self._last_end_s - arrived_s))
        return max(0.0, SHARE * (forward_s + self.absence_s) - waited_s)

    def _allowance_alone_s(self, now_s: float) -> float | None:
        if self.expected_until_s(now_s) is None:
            self._debt_s = 0.0  # nobody is there to be paid
            return MAX_READING_S
        forward_s = self._least_s()
        return None if forward_s is None else forward_s + self.absence_s

    def num_tokens_within(self, allowance_s: float, past: int, num_left: int, *, beside: bool) -> int:
        """Return how many of a prompt's `num_left` next tokens may be read, `beside` rounds or alone.

        They may exceed the allowance where the cache before them takes most of it: they take as long as that.
        """
        cost = self._cost(beside)
        token_s, pass_s = cost.token_s(past), cost.pair_s * PASS_TOKENS * past
        if pass_s + token_s * num_left <= allowance_s:
            return num_left
        if allowance_s <= 0:
            return 0
        num_worth_it = math.ceil(pass_s / token_s)
        return min(num_left, max(MIN_PIECE_TOKENS, num_worth_it, int((allowance_s - pass_s) / token_s)))

    def reading_s(self, piece: Piece, *, beside: bool = False) -> float:
        """Return how long a piece takes."""
        cost = self._cost(beside)
        return max(LEAST_TOKEN_S * piece.num_tokens, cost.each_s * piece.num_tokens + cost.pair_s * piece.num_pairs)

    def _cost(self, beside: bool) -> ReadingCost:
        """Return what tokens cost; where one kind was not measured yet the other one's."""
        cost, other = (self._beside, self._alone) if beside else (self._alone, self._beside)
        return cost if cost.is_measured else other
