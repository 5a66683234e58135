"""The target's hidden states, as they arrive with a request."""

import torch

from specdec.errors import InvalidArgumentError
from specdec.exact.values import Observations


def states_of(observations: Observations, num_layers: int, hidden_size: int) -> torch.Tensor:
    """Return bfloat16 states [N, num_layers, hidden_size]. Raises InvalidArgumentError for another number of bytes."""
    expected = 2 * num_layers * hidden_size
    wrong = next((len(state) for state in observations.hidden_states if len(state) != expected), None)
    if wrong is not None:
        problem = f"hold {wrong} bytes of hidden states a token; this head reads {num_layers} layers of {hidden_size}"
        raise InvalidArgumentError({"propose.observations": f"{problem}, {expected} bytes: is it for another target?"})
    if not observations.hidden_states:
        return torch.empty(0, num_layers, hidden_size, dtype=torch.bfloat16)
    content = bytearray(b"".join(observations.hidden_states))
    return torch.frombuffer(content, dtype=torch.bfloat16).view(-1, num_layers, hidden_size)


def new_positions(start: int, states: torch.Tensor, after: int, end: int) -> list[int]:
    """Return the positions after `after` and before `end` at which there are finite states [N, ...] from `start` on."""
    is_finite = states.isfinite().flatten(1).all(dim=1).tolist()
    first = max(after + 1, start)
    return [position for position in range(first, min(end, start + len(states))) if is_finite[position - start]]
