"""Linear layers whose bfloat16 weight is packed once for the CPU.

`torch.nn.functional.linear` reorders a bfloat16 weight for oneDNN at every call; for the few rows of a decoding forward
that costs more than the product itself. The same kernel on a weight packed once gives the same bits.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it replaces computes, bit for bit, with its weight packed once."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = pack_weight(linear.weight.detach())
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was before packing, [out_features, in_features]; made anew at each reading."""
        return self._packed.to_dense()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in_features] -> [..., out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out_features, in_features] in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def pack_linears(model: nn.Module) -> int:
    """Replace every bfloat16 CPU `nn.Linear` whose packed product is bit-identical; return how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = try_prepack(child)
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def try_prepack(module: nn.Module) -> PackedLinear | None:
    """Return the module's packed twin, or None where there is none that gives the same bits."""
    if type(module) is not nn.Linear or module.weight.dtype != torch.bfloat16 or module.weight.device.type != "cpu":
        return None
    try:
        packed = PackedLinear(module)
        same = all(_gives_same_bits(module, packed, num_rows) for num_rows in (1, 5))
    except (RuntimeError, AttributeError, NotImplementedError):  # a torch built without oneDNN
        return None
    return packed if same else None


def _gives_same_bits(linear: nn.Linear, packed: PackedLinear, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(1, num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)
    return torch.equal(linear(rows), packed(rows))
