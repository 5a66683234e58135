"""Log probabilities in OpenAI's two forms."""

import math
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.choices import ChatForm, Choice, CompletionForm, Form
from gateway.token_texts import TokenTexts
from specdec.completion import Chunk, Finish, Usage
from specdec.types import FinishReason, Statistics, TokenLogprobs, TokenOrigin

TEXTS = TokenTexts(Tokenizer(WordLevel({"a": 0, "bc": 1, "d": 2}, unk_token="a")))
CHUNKS = [
    Chunk(
        session_id="s",
        offset=0,
        tokens=(0, 1),
        text="abc",
        origins=(TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
        digest=b"",
        logprobs=(
            TokenLogprobs(-0.5, ((0, -0.5), (1, -1.0))),
            TokenLogprobs(-2.0, ((2, -0.1), (1, -math.inf))),
        ),
        text_ends=(1, 3),
    ),
    Chunk(
        session_id="s",
        offset=2,
        tokens=(2,),
        text="d",
        origins=(TokenOrigin.BONUS,),
        digest=b"",
        logprobs=(TokenLogprobs(-0.25, ()),),
        text_ends=(1,),
        finish=Finish(FinishReason.LENGTH, Usage(2, 3), Statistics()),
    ),
]


def whole(form: Form) -> Any:
    choice = Choice(0, form, TEXTS, with_details=False)
    for chunk in CHUNKS:
        choice.keep(choice.take(chunk))
    return choice.whole()


def test_chat_has_an_entry_for_each_token() -> None:
    entries = whole(ChatForm())["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"], entry["logprob"]) for entry in entries] == [
        ("a", [97], -0.5),
        ("bc", [98, 99], -2.0),
        ("d", [100], -0.25),
    ]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [["a", "bc"], ["d", "bc"], []]
    assert entries[1]["top_logprobs"][1]["logprob"] == -9999.0


def test_completion_has_four_lists() -> None:
    assert whole(CompletionForm())["logprobs"] == {
        "tokens": ["a", "bc", "d"],
        "token_logprobs": [-0.5, -2.0, -0.25],
        "top_logprobs": [{"a": -0.5, "bc": -1.0}, {"d": -0.1, "bc": -9999.0}, {}],
        "text_offset": [0, 1, 3],
    }


def test_pieces_add_up_to_the_whole() -> None:
    choice = Choice(0, CompletionForm(), TEXTS, with_details=False)
    pieces = [piece for chunk in CHUNKS for piece in choice.pieces(choice.take(chunk))]
    entire = whole(CompletionForm())
    assert "".join(piece["text"] for piece in pieces) == entire["text"] == "abcd"
    for name, entries in entire["logprobs"].items():
        assert [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][name]] == entries
