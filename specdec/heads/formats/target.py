"""What a head takes from its target: sizes, the token embeddings, and rows of the output layer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from specdec.heads.formats.files import HeadRefused, folder_of

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # ends of names, by architecture
OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight")
INDEX_FILE = "model.safetensors.index.json"
TARGET_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A target on the disk, of which single tensors are read."""

    folder: Path
    config: PretrainedConfig  # of its language model

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Its layers."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of its embeddings, with any padding."""
        return int(self.config.vocab_size)

    def embeddings(self) -> torch.Tensor:
        """Return the token embeddings [vocab_size, hidden_size]. Raises HeadRefused."""
        found = self._tensor(EMBEDDING_NAMES)
        if found is None:
            raise HeadRefused(f"{self.folder} has no token embeddings among its weights; give the target's folder")
        return found

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the output layer's rows of some tokens, [len(token_ids), hidden_size]. Raises HeadRefused."""
        output = self._tensor(OUTPUT_NAMES)
        return (self.embeddings() if output is None else output)[token_ids]

    def _tensor(self, ends: tuple[str, ...]) -> torch.Tensor | None:
        for name, file in self._files().items():
            if name.endswith(ends):
                return _read(file, name)
        return None

    def _files(self) -> dict[str, Path]:
        """Return which file holds each tensor."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            places = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / file for name, file in places.items()}
        return {name: file for file in sorted(self.folder.glob("*.safetensors")) for name in _names(file)}


def target_folder(name: str) -> TargetFolder:
    """Return the target of this folder or hub id. Raises HeadRefused."""
    folder = folder_of(name, TARGET_PATTERNS)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadRefused(f"the configuration of {folder} cannot be read: {reason}") from error
    return TargetFolder(folder, config.get_text_config(decoder=True))


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise HeadRefused(f"{file} is damaged ({error}); download or copy it again") from error


def _read(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, "pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise HeadRefused(f"{file} is damaged ({error}); download or copy it again") from error
