"""`specdec up` with real services: signals, and children that die or never start."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from specdec.serving.local.commands import WORKER_NICENESS
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.command_line import specdec, start
from tests.support.running_up import all_gone, is_alive, up


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = save_tokenizer(build("llama", folder / "target"), VOCAB_SIZE)
    draft = save_tokenizer(build("llama", folder / "draft", seed=1), VOCAB_SIZE)
    return str(target), str(draft)


async def test_up_serves_until_ctrl_c(models: tuple[str, str]) -> None:
    target, draft = models
    async with up("--target", target, "--draft", draft, "--dtype", "float32") as running:
        address = await running.ready()
        children = running.children
        assert set(children) == {"target_service", "draft_service", "coordinator"}
        niceness = {module: os.getpriority(os.PRIO_PROCESS, number) for module, number in children.items()}
        assert niceness["target_service"] == niceness["draft_service"] >= WORKER_NICENESS
        assert niceness["coordinator"] == os.getpriority(os.PRIO_PROCESS, 0)
        greedy = ["generate", "t5 t6 t7", "--address", address, "--temperature", "0", "--max-new-tokens", "24"]
        texts = [
            await specdec(*greedy, *options)
            for options in (["--num-draft-tokens", "0"], ["--num-draft-tokens", "4"], ["--drafter", "ngram"])
        ]
        assert [text.code for text in texts] == [0, 0, 0], texts
        assert texts[0].out
        assert texts[0].out == texts[1].out == texts[2].out
        assert "drafters  model, recycle, ngram, suffix" in (await specdec("model", "--address", address)).out
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0
        await all_gone([*children.values()])


@pytest.mark.long
async def test_up_serves_openai_clients(models: tuple[str, str]) -> None:
    async with up("--target", models[0], "--http-port", "0") as running:
        address, base_url = await running.ready(), await running.http()
        children = running.children
        assert set(children) == {"target_service", "draft_service", "coordinator", "gateway"}
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            [model] = [entry.id async for entry in client.models.list()]
            answer = await client.completions.create(model=model, prompt="t5 t6 t7", temperature=0, logprobs=1)
        greedy = ["generate", "t5 t6 t7", "--address", address, "--temperature", "0", "--max-new-tokens", "16"]
        assert answer.choices[0].text == (await specdec(*greedy)).out.removesuffix("\n")
        assert answer.choices[0].logprobs is not None
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0
        await all_gone([*children.values()])


@pytest.mark.long
async def test_second_signal_ends_hanging_streams(models: tuple[str, str]) -> None:
    async with up("--target", models[0], "--draft", "none", "--drain-s", "3600") as running:
        address = await running.ready()
        children = running.children
        assert set(children) == {"target_service", "coordinator"}
        os.kill(children["target_service"], signal.SIGSTOP)
        streaming = await start("generate", "t5", "--address", address)
        running.process.send_signal(signal.SIGTERM)
        await running.logged("draining")
        assert is_alive(children["target_service"])
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
        await all_gone([*children.values()])
        with suppress(ProcessLookupError):  # it may have exited already
            streaming.kill()
        await streaming.communicate()


@pytest.mark.long
async def test_no_child_survives_a_killed_parent(models: tuple[str, str]) -> None:
    async with up("--target", models[0]) as running:
        await running.ready()
        children = running.children
        assert len(children) == 3
        running.process.kill()
        await all_gone([*children.values()])


@pytest.mark.long
async def test_draft_worker_that_never_starts_ends_up(tmp_path: Path, models: tuple[str, str]) -> None:
    shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    async with up("--target", models[0], "--draft", str(tmp_path)) as running:
        assert await running.ended() == 1
        assert running.errors[-1].startswith("specdec: the draft worker ended with exit code 1: ")


async def test_unservable_model_gives_one_sentence(tmp_path: Path, models: tuple[str, str]) -> None:
    shutil.copytree(models[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    async with up("--target", str(tmp_path)) as running:
        assert await running.ended() == 1
        assert running.errors[-1].startswith("specdec: the target worker ended with exit code 1: ")
        assert "Traceback" not in "".join(running.errors)
