"""What the drafters of one session want to know about the target's forwards: asked for once, handed to each."""

from collections.abc import Iterable

from specdec.exact.values import MAX_OBSERVED_LAYERS, MAX_TOP_TOKENS, ObservationRequest, Observations

NOTHING = ObservationRequest()


def joined(requests: Iterable[ObservationRequest], num_layers: int) -> ObservationRequest:
    """Return one request to a target of so many layers that covers the given ones.

    A request that the target would refuse, alone or with those before it, is left out: its drafter observes nothing.
    """
    whole = NOTHING
    for request in requests:
        layers = tuple(dict.fromkeys((*whole.hidden_layers, *request.hidden_layers)))
        more = ObservationRequest(layers, max(whole.num_top_tokens, request.num_top_tokens))
        if _is_valid(more, num_layers):
            whole = more
    return whole


def _is_valid(request: ObservationRequest, num_layers: int) -> bool:
    layers = request.hidden_layers
    fits = len(layers) <= MAX_OBSERVED_LAYERS and max(layers, default=0) <= num_layers
    return fits and request.num_top_tokens <= MAX_TOP_TOKENS


def part_of(observations: Observations, whole: ObservationRequest, wanted: ObservationRequest) -> Observations | None:
    """Return what one drafter wanted of what the whole request brought; None where that does not cover it."""
    if not wanted or not set(wanted.hidden_layers) <= set(whole.hidden_layers):
        return None
    if wanted.num_top_tokens > whole.num_top_tokens:
        return None
    hidden, top = tuple[bytes, ...](), tuple[bytes, ...]()
    if wanted.hidden_layers:
        places = [whole.hidden_layers.index(layer) for layer in wanted.hidden_layers]
        hidden = tuple(_layers(state, len(whole.hidden_layers), places) for state in observations.hidden_states)
    if wanted.num_top_tokens:
        top = tuple(tokens[: 4 * wanted.num_top_tokens] for tokens in observations.top_tokens)
    return Observations(observations.start, hidden, top)


def _layers(state: bytes, num_layers: int, places: list[int]) -> bytes:
    """Return some layers of one token's bfloat16[num_layers, hidden size]."""
    size = len(state) // num_layers
    return b"".join(state[place * size : (place + 1) * size] for place in places)
