"""Fill a volume with models: `python fill.py models.toml /models`. It needs huggingface_hub for hub:// alone.

A model is fetched into a hidden folder, where a later run goes on, is compared with its checksums, and gets its name as
the last step: a folder with a model's name is complete. A run with nothing to do compares the files once more.
"""

import hashlib
import http.client
import json
import re
import shutil
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

SUMS_FILE = "SHA256SUMS"
SOURCE_FILE = "source.txt"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*")
CHUNK_BYTES = 8 << 20
TIMEOUT_S = 60.0
NUM_ATTEMPTS = 5
GONE = (401, 403, 404, 410)  # what another attempt does not mend
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HUB = re.compile(r"hub://(?P<repository>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})")
SUM = re.compile(rf"(?P<digest>[0-9a-f]{{64}})  ?\*?(?P<name>{NAME.pattern})")

Checksums = dict[str, str]
"""By file: `sha256:...`, or `git:...` as a hub has it of small files."""


class CannotFill(Exception):
    """A model is not there and cannot be fetched. The message says why, and what to do."""


def fill(root: Path, name: str, source: str) -> None:
    """Fetch one model into the folder `name`, or check the one that is there. Raises CannotFill."""
    folder, part = root / name, root / f".{name}.part"
    if folder.exists():
        check_kept(folder, source)
        say(f"{name}: is there, and complete")
        return
    if part.exists() and _read(part / SOURCE_FILE) != source:
        shutil.rmtree(part)
    part.mkdir(exist_ok=True)
    (part / SOURCE_FILE).write_text(source)
    sums = fetch(source, part)
    check(part, sums)
    check_parts(part)
    keep(part, sums)
    part.rename(folder)
    say(f"{name}: complete, {len(sums)} files, {_num_bytes(folder) >> 20} MiB")


def fetch(source: str, part: Path) -> Checksums:
    """Fetch all files of a source; return their checksums. Raises CannotFill."""
    if hub := HUB.fullmatch(source):
        return from_hub(hub["repository"], hub["commit"], part)
    parts = urlsplit(source)
    if parts.scheme == "https" and parts.netloc:
        return from_folder_of_server(source.rstrip("/") + "/", part)
    if parts.scheme == "file" and not parts.netloc:
        return from_folder(Path(unquote(parts.path)), part)
    raise CannotFill(
        f"the source {source!r} is none; give hub://OWNER/NAME@COMMIT with the commit's 40 digits, "
        "https://HOST/FOLDER/ or file:///FOLDER"
    )


# --- from a model hub


def from_hub(repository: str, commit: str, part: Path) -> Checksums:
    """Fetch a model from the hub that HF_ENDPOINT names, or the public one."""
    from huggingface_hub import HfApi, RepoFile, snapshot_download

    try:
        listed = [file for file in HfApi().list_repo_tree(repository, revision=commit) if isinstance(file, RepoFile)]
        wanted = [file for file in listed if any(Path(file.path).match(pattern) for pattern in HUB_FILES)]
        _check_space(part, sum(file.size for file in wanted))
        names = [file.path for file in wanted]
        snapshot_download(repository, revision=commit, local_dir=part, allow_patterns=names, max_workers=2)
    except Exception as error:  # the library raises errors of half a dozen others
        raise CannotFill(f"the hub does not give {repository}: {_first_line(error)}") from error
    return {file.path: f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}" for file in wanted}


# --- from a folder of a web server, which lists its files in SHA256SUMS


def from_folder_of_server(address: str, part: Path) -> Checksums:
    """Fetch the files that SHA256SUMS lists."""
    with _opened(address + SUMS_FILE, {}) as answer:
        sums = parse_sums(answer.read().decode())
    for name, checksum in sums.items():
        if not (part / name).exists() or _checksum(part / name, checksum) != checksum:
            download(address + quote(name), part / name)
    return sums


def parse_sums(text: str) -> Checksums:
    """Return the files of a list as `sha256sum` prints it. Raises CannotFill."""
    matches = [SUM.fullmatch(line) for line in text.splitlines() if line.strip()]
    if not matches or None in matches:
        raise CannotFill(f"{SUMS_FILE} is no list of checksums; make it with `sha256sum * > {SUMS_FILE}` in the folder")
    return {match["name"]: f"sha256:{match['digest']}" for match in matches if match}


def download(address: str, file: Path) -> None:
    """Fetch a file; go on where an earlier attempt broke off. Raises CannotFill."""
    unfinished = file.with_name(file.name + ".unfinished")
    for attempt in range(NUM_ATTEMPTS):
        try:
            _go_on(address, unfinished)
        except (OSError, EOFError, http.client.HTTPException) as error:
            say(f"{file.name}: {_first_line(error)}; attempt {attempt + 1} of {NUM_ATTEMPTS}")
            time.sleep(attempt)
        else:
            unfinished.rename(file)
            return
    raise CannotFill(f"{address} breaks off; the next run goes on where this one was")


def _go_on(address: str, unfinished: Path) -> None:
    start = unfinished.stat().st_size if unfinished.exists() else 0
    try:
        answer = _opened(address, {"Range": f"bytes={start}-"} if start else {})
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # all of it is there; its checksum is looked at later
        raise
    is_continued = answer.status == http.HTTPStatus.PARTIAL_CONTENT
    with answer, unfinished.open("ab" if is_continued else "wb") as output:
        expected = output.tell() + int(answer.headers["Content-Length"] or 0)
        shutil.copyfileobj(answer, output, CHUNK_BYTES)
        if output.tell() < expected:
            raise EOFError(f"{output.tell()} of {expected} bytes came")


def _opened(address: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Return the answer to a GET. Raises OSError where another attempt may help, else CannotFill."""
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        if error.code in GONE:
            raise CannotFill(f"{address} answers {error.code} {error.reason}; look at the source's address") from error
        raise
    return answer


# --- from a folder of the image


def from_folder(source: Path, part: Path) -> Checksums:
    """Copy the files of a folder."""
    if not source.is_dir():
        raise CannotFill(f"{source} is no folder of this image; build the job's image with the model in it")
    files = [file for file in sorted(source.iterdir()) if file.is_file()]
    _check_space(part, _num_bytes(source))
    sums = {file.name: _checksum(file) for file in files}
    for file in files:
        if not (part / file.name).exists() or _checksum(part / file.name) != sums[file.name]:
            shutil.copyfile(file, part / file.name)
    return sums


# --- checks


def check(folder: Path, sums: Checksums) -> None:
    """Compare files with their checksums; remove those that differ. Raises CannotFill."""
    missing = [name for name in sums if not (folder / name).is_file()]
    wrong = [name for name in sums if name not in missing and _checksum(folder / name, sums[name]) != sums[name]]
    for name in wrong:
        (folder / name).unlink()
    if missing or wrong:
        raise CannotFill(f"{', '.join([*missing, *wrong])} did not arrive as published; the next run fetches it again")


def check_kept(folder: Path, source: str) -> None:
    """Compare a complete folder with what was written down. Raises CannotFill."""
    if (kept := _read(folder / SOURCE_FILE)) != source:
        raise CannotFill(
            f"{folder} holds {kept or 'something else'}, which workers may be reading; give {source} another name"
        )
    sums = parse_sums(_read(folder / SUMS_FILE))
    wrong = [name for name in sums if _checksum(folder / name, sums[name]) != sums[name]]
    if wrong:
        raise CannotFill(
            f"{', '.join(wrong)} in {folder} has changed; delete the folder, or give the model another name"
        )


def check_parts(folder: Path) -> None:
    """Look for what every model has, and for all shards of its weights. Raises CannotFill."""
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    missing = [name for name in ("config.json", "tokenizer.json", *sorted(shards)) if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CannotFill(f"the source has no {', '.join(missing)}; a model needs them")


def keep(part: Path, sums: Checksums) -> None:
    """Remove everything but the model's files, and write their checksums down."""
    for file in part.iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in {*sums, SOURCE_FILE}:
            file.unlink()
    digests = {name: known if known.startswith("sha256:") else _checksum(part / name) for name, known in sums.items()}
    lines = (f"{digest.removeprefix('sha256:')}  {name}\n" for name, digest in sorted(digests.items()))
    (part / SUMS_FILE).write_text("".join(lines))


def _checksum(file: Path, like: str = "sha256:") -> str:
    """Return a file's checksum of the same kind; empty where there is no file."""
    if not file.is_file():
        return ""
    kind = like.partition(":")[0]
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def _check_space(part: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(part).free + _num_bytes(part)
    if num_bytes > free:
        raise CannotFill(f"the model has {num_bytes >> 20} MiB, and the volume {free >> 20}; enlarge the claim")


# --- the command


def read_list(file: Path) -> dict[str, str]:
    """Return the sources of all models by name. Raises CannotFill."""
    try:
        models = tomllib.loads(file.read_text())["models"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise CannotFill(f"{file.name} needs a table [models] of names and sources: {error}") from error
    for name, source in models.items():
        if not NAME.fullmatch(name) or not isinstance(source, str):
            raise CannotFill(f"{file.name}: {name} = {source!r} is no folder's name and source")
    return dict(models)


def main(arguments: Iterable[str]) -> None:
    """Fill the volume; exit with 1 and one sentence if that fails."""
    file, root = map(Path, arguments)
    try:
        for name, source in read_list(file).items():
            fill(root, name, source)
    except (CannotFill, OSError) as error:
        sys.exit(f"fill: {_first_line(error)}")


def say(line: str) -> None:
    """Tell the job's log."""
    print(f"fill: {line}", flush=True)


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
