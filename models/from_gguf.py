"""A model in a GGUF file as a folder that the services load: safetensors in bfloat16, tokenizer, chat template."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

# How text is split before it is encoded, by `tokenizer.ggml.pre`, where transformers leaves a part of it out.
SPLITS = {
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
}


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to a folder. Weights of fewer bits are unpacked and rounded to bfloat16."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        # without it the weights stay packed where a kernel for that is installed, and cannot be saved
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer(file, model.config.max_position_embeddings).save_pretrained(folder)


def tokenizer(file: Path, context_length: int) -> Any:
    """Return transformers' tokenizer of a GGUF file."""
    loaded = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, model_max_length=context_length)
    split = SPLITS.get(split_name(file))
    if split is not None:
        loaded.backend_tokenizer.pre_tokenizer = split
    return loaded


def split_name(file: Path) -> str:
    """Return the file's name for how text is split; empty where it has none."""
    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field else ""
