"""The model card of a trained head."""

from dataclasses import dataclass
from pathlib import Path

CARD = """\
---
base_model: {target}
tags:
- speculative-decoding
- {kind}
---

# {kind} for {target}

A drafter for speculative decoding: {paper}. It was trained by `python -m models.train_head` on the target's
own answers to {prompts}, half of them greedy, half sampled at temperature 1.

| | |
|---|---|
| target | `{target}`, fingerprint of the weights that it was trained on: `{fingerprint}` |
| weights | {num_parameters:,} parameters that were trained, {megabytes:.1f} MB |
| draft vocabulary | {draft_vocab_size:,} tokens, which make up {coverage:.1%} of the target's answers |
| trained on | {num_tokens:,} tokens (prompts included), {num_steps:,} steps, {minutes:.0f} min |
| hardware | {hardware} |

How held-out drafts fare, by depth from 1 on, where all tokens before are the target's own: the rate at which the
drafter's first choice is the target's token, at which that token is among its four first choices, and the overlap,
sum min(p, q), of both distributions:

```
{evaluation}
```

Serve it: `specdec up --target {target} {flag} THIS_FOLDER`
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a card tells of a head."""

    kind: str
    paper: str
    flag: str
    target: str
    fingerprint: str
    num_parameters: int  # that are written
    draft_vocab_size: int
    coverage: float  # of the target's answers by the draft vocabulary
    prompts: str  # what they answer
    num_tokens: int  # of the samples
    num_steps: int
    minutes: float
    hardware: str
    evaluation: str


def write_card(folder: Path, trained: Trained) -> None:
    """Write a folder's README.md."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    values = {name: getattr(trained, name) for name in trained.__slots__}
    (folder / "README.md").write_text(CARD.format(megabytes=weights / 1e6, **values), encoding="utf-8")
