"""A model of another tokenizer: the demo draft with a third of its merges gone and every id moved."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

DEMO_DRAFT = Path(__file__).parents[2] / "models" / "draft"
NUM_KEPT = 2800  # of 4,096 tokens; the later ones are merged from these


@torch.no_grad()
def save_draft_of_other_tokenizer(folder: Path) -> Path:
    """Save the model and its tokenizer, which cuts the same text into other and more tokens."""
    order = list(range(NUM_KEPT))  # the old id of each new one
    random.Random(1).shuffle(order)
    # transformers does not annotate the class that it loads
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_DRAFT, dtype=torch.float32)
    rows = model.get_input_embeddings().weight[order].clone()
    model.resize_token_embeddings(NUM_KEPT)
    model.get_input_embeddings().weight.copy_(rows)
    model.save_pretrained(folder)
    content = json.loads((DEMO_DRAFT / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(_moved(content, {old: new for new, old in enumerate(order)})))
    return folder


def _moved(content: dict[str, Any], new_ids: dict[int, int]) -> dict[str, Any]:
    """Return a tokenizer's description with the tokens that have a new id, and the merges that make them."""
    model = content["model"]
    model["vocab"] = {text: new_ids[old] for text, old in model["vocab"].items() if old in new_ids}
    model["merges"] = [pair for pair in model["merges"] if "".join(_pair(pair)) in model["vocab"]]
    for added in content["added_tokens"]:
        added["id"] = new_ids[added["id"]]
    return content


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
