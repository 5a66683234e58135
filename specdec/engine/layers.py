"""Some of a model's layers: a smaller model that needs no training (Zhang et al. 2024, "Draft & Verify").

The embeddings, the final norm and the head stay. A layer that is kept is made as it is in the whole model, so settings
that differ from layer to layer (windows, rotations) go with it.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specdec.engine.errors import ModelRefused


class LayerStack:
    """A model's layers, of which it can be told to run only some."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self.name, modules = _stack(model)
        self._modules = list(modules)
        self._by_layer = {
            key: value
            for key, value in vars(self._config).items()
            if isinstance(value, list) and len(value) == len(self)
        }

    def __len__(self) -> int:
        return len(self._modules)

    def keep(self, layers: Sequence[int]) -> None:
        """Let the model run these layers, in ascending order: modules, their number, and the settings of each."""
        parent, _, attribute = self.name.rpartition(".")
        kept = nn.ModuleList(self._modules[layer] for layer in layers)
        setattr(self._model.get_submodule(parent), attribute, kept)
        for key, values in self._by_layer.items():
            setattr(self._config, key, [values[layer] for layer in layers])
        self._config.num_hidden_layers = len(layers)


def _stack(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the model's layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ModelRefused(f"{type(model).__name__} has no list of its {count} layers to choose from; serve all of them")


def check_layers(name: str, config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Raise ModelRefused for layers that the model has not."""
    count = config.get_text_config(decoder=True).num_hidden_layers
    absent = [layer for layer in layers if layer >= count]
    if absent:
        which = f"layer {absent[0]}" if len(absent) == 1 else f"layers {', '.join(map(str, absent))}"
        raise ModelRefused(f"{name} has no {which}; its {count} layers are 0 to {count - 1}")


def class_with_layers(config: PreTrainedConfig, layers: Sequence[int]) -> type[PreTrainedModel]:
    """Return the configuration's model class, which makes and loads these layers alone, with the others as identities.

    `LayerStack.keep` completes what it loads.
    """
    # transformers does not annotate its mappings
    whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def initialise(self: Any, config: PreTrainedConfig) -> None:
        whole.__init__(self, config)
        name, stack = _stack(self)
        dropped = [index for index in range(len(stack)) if index not in layers]
        for index in dropped:
            stack[index] = nn.Identity()
        ignored = rf"{re.escape(name)}\.({'|'.join(map(str, dropped))})\."
        self._keys_to_ignore_on_load_unexpected = {ignored, *(whole._keys_to_ignore_on_load_unexpected or ())}

    # transformers converts the weights of its own modules' classes alone, by name
    members = {"__init__": initialise, "__module__": whole.__module__}
    made: type[PreTrainedModel] = type(whole.__name__, (whole,), members)
    return made
