"""OpenAI's npm package, as it is, against the gateway in front of real services (tests/gateway/openai_npm)."""

import json
import re
from pathlib import Path

import pytest

from specdec import AsyncClient
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer
from tests.support.gateway import serving_gateway
from tests.support.node import missing, output_of

FOLDER = Path(__file__).parent / "openai_npm"
PROMPT = "t5 t6 t7"
NUM_TOKENS = 24
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
REASON = missing(FOLDER)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
async def test_package_gets_the_clients_own_text(tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path / "model"), VOCAB_SIZE)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with cluster(model, model) as running, serving_gateway(running.address, tokenizer=str(model)) as port:
        async with AsyncClient(running.address) as client:
            own = await client.complete(
                PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, num_logprobs=0
            )
        expected = {
            "model": model.name,
            "prompt": PROMPT,
            "text": own.text,
            "tokens": [f"t{token}" for token in own.tokens],
            "logprobs": [entry.logprob for entry in own.logprobs],
        }
        environment = {"SPECDEC_BASE_URL": f"http://127.0.0.1:{port}/v1", "SPECDEC_EXPECTED": json.dumps(expected)}
        code, said = await output_of("npm", "test", folder=FOLDER, environment=environment)
    failed = [line for line in said.splitlines() if re.match(r"\s*(not ok|error:|expected:|actual:)", line)]
    assert (code, failed) == (0, [])
    assert re.search(r"^\S+ pass 12$", said, re.M)
