"""What cannot be divided among processes is refused before anything is loaded."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from specdec.engine.errors import ModelRefused
from specdec.engine.parallel.group import Place

GPU = "cuda"
DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "hidden units in an MLP",
    "moe_intermediate_size": "hidden units in an expert",
}


def check_divisible(name: str, config: PreTrainedConfig, size: int) -> None:
    """Raise ModelRefused for a model that `size` processes cannot share evenly, by transformers' own plan."""
    if "tp_size" not in DistributedConfig.__dataclass_fields__:
        raise ModelRefused("this transformers cannot divide a model among processes; install 5.23 or newer")
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "base_model_tp_plan", None):
        raise ModelRefused(
            f"transformers has no plan to divide {name} ({text_config.model_type}) among processes; serve it with one, "
            "or choose another architecture"
        )
    for attribute, what in DIVIDED.items():
        count = getattr(text_config, attribute, None)
        if isinstance(count, int) and count % size:
            raise ModelRefused(
                f"{name} has {count} {what}, which {size} processes cannot share evenly; use a number that divides it"
            )


def share_options(num_shares: int) -> dict[str, Any]:
    """Return what tells transformers to load one of so many shares of a model; nothing for the whole."""
    return {"distributed_config": DistributedConfig(tp_size=num_shares)} if num_shares > 1 else {}


def check_device(device: torch.device, place: Place) -> torch.device:
    """Return this process's own device; raise ModelRefused where transformers would take another one, or none is left.

    transformers divides a model among the accelerators wherever torch sees some.
    """
    accelerator = torch.accelerator.current_accelerator()
    found = accelerator.type if accelerator else "cpu"
    if found != device.type:
        raise ModelRefused(
            f"several processes share a model on the {found} that torch sees, not on the {device.type} that was asked "
            "for; hide it (for CUDA: CUDA_VISIBLE_DEVICES=), or ask for it"
        )
    if device.type != GPU:
        return device
    if place.device_index >= torch.cuda.device_count():
        raise ModelRefused(
            f"{place.size} processes need a GPU each, and torch sees {torch.cuda.device_count()}; use fewer processes"
        )
    torch.cuda.set_device(place.device_index)
    return torch.device(GPU, place.device_index)
