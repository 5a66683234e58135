"""The bytes that a forward reads: weights once for all sessions, each session's cache, and each token's embedding.

A forward over few tokens is bound by memory: the time in which its bytes are read is a lower bound of its own, and
bandwidth over bytes an upper bound of forwards a second (Leviathan et al. 2023, section 3.4, on memory accesses).
"""

from dataclasses import dataclass

from specdec.accounting.architecture import Architecture

SCALE_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How values are stored: bits, and how many share a scale."""

    bits: int
    values_per_scale: int | None = None  # None: no scale; 0: a row shares one

    def num_bytes(self, num_values: float, row: int) -> float:
        """Return the bytes of matrices with rows of so many values."""
        per_scale = row if self.values_per_scale == 0 else self.values_per_scale
        scales = SCALE_BYTES * num_values / per_scale if per_scale else 0.0
        return num_values * self.bits / 8 + scales


FORMATS = {
    "float32": NumberFormat(32),
    "bfloat16": NumberFormat(16),
    "float16": NumberFormat(16),
    "int8": NumberFormat(8, 0),
    "int4": NumberFormat(4, 128),
}
UNQUANTISED = "bfloat16"  # what is beside quantised matrices: norms, biases, embedding, head


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in memory: its sizes and its number formats."""

    sizes: Architecture
    matrices: str = "bfloat16"  # of attention and MLP
    cache: str = "bfloat16"

    @property
    def _rest(self) -> NumberFormat:
        own = FORMATS[self.matrices]
        return FORMATS[UNQUANTISED] if own.values_per_scale is not None else own

    def layers_bytes(self, num_experts: float) -> float:
        """Return the bytes of all layers' matrices, norms and biases, with so many experts of each."""
        sizes, form = self.sizes, FORMATS[self.matrices]
        matrices = form.num_bytes(sizes.attention + num_experts * sizes.expert, sizes.hidden_size)
        beside = self._rest.num_bytes(sizes.num_layers * sizes.router + sizes.small, 1)
        return sizes.num_layers * matrices + beside

    @property
    def head_bytes(self) -> float:
        """The bytes of the output head, which is the embedding where they are tied."""
        return self._rest.num_bytes(self.sizes.embedding, self.sizes.hidden_size)

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights."""
        tables = self.head_bytes * (1 if self.sizes.is_tied else 2)
        return self.layers_bytes(max(self.sizes.num_experts, 1)) + tables

    def cache_bytes(self, context: int) -> float:
        """Return the bytes of a session's cache that a forward reads."""
        return FORMATS[self.cache].num_bytes(
            self.sizes.cached_tokens(context) * self.sizes.kv_values, self.sizes.head_size
        )

    def experts_read(self, num_tokens: int) -> float:
        """Return the expected number of a layer's experts that some of the tokens choose, if each chooses evenly."""
        total, active = self.sizes.num_experts, self.sizes.num_active_experts
        return total * (1 - (1 - active / total) ** num_tokens) if total else 1.0

    def forward(self, num_sessions: int, num_tokens: int, context: int) -> "Traffic":
        """Return what one forward reads, for some sessions with so many new tokens each."""
        all_tokens = num_sessions * num_tokens
        return Traffic(
            layers=self.layers_bytes(self.experts_read(all_tokens)),
            head=self.head_bytes,
            embedding=self._rest.num_bytes(all_tokens * self.sizes.hidden_size, self.sizes.hidden_size),
            cache=num_sessions * self.cache_bytes(context),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a forward reads, by what they are."""

    layers: float
    head: float
    embedding: float  # a row for each token
    cache: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.head + self.embedding + self.cache
