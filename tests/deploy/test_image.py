"""A dry build of the images succeeds and finds seeded mistakes; `make image-check` builds them for real."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import lock
from deploy.image_check import pip_settings
from deploy.image_check.engine import NOTHING_BUILDS, choose_engine
from deploy.image_check.generation import Generated, compare, parse
from deploy.image_check.processes import CheckFailed, run
from tests.support.dry_build import BuildFailed, Call, DryBuild
from tests.support.manifests import REPOSITORY, Dockerfile

TEXT = (REPOSITORY / "deploy/Dockerfile").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()
IMAGES = re.findall(r"^IMAGES := (.*)$", MAKEFILE, re.M)[0].split()
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()


def dry_build(text: str, folder: Path, **arguments: str) -> DryBuild:
    """Return all images built with fakes. Raises BuildFailed."""
    build = DryBuild(Dockerfile(text), REPOSITORY, folder, **arguments)
    for name in IMAGES:
        build.build(name)
    return build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> DryBuild:
    return dry_build(TEXT, tmp_path_factory.mktemp("images"))


def build_requirements() -> set[str]:
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    return {re.findall(r"^[\w-]+", each)[0] for each in required}


def pip_problems(calls: list[Call]) -> Iterator[str]:
    """Everything that pip installs is pinned, and the wheel's build finds its requirements installed."""
    installed: set[str] = set()
    for call in (call for call in calls if call.program == "pip"):
        if call.words[0] == "install":
            installed |= {requirement.split("==")[0] for requirement in locked(_file(call, "--requirement"))}
            if not _is_pinned(call):
                yield f"{call.stage}: pip {' '.join(call.words)} is not pinned"
        elif not {"--no-build-isolation", "--no-deps"} <= set(call.words):
            yield f"{call.stage}: pip {call.words[0]} fetches what is not pinned"
        else:
            yield from (f"{call.stage}: {name} is not installed" for name in build_requirements() - installed)


def compiler_problems(calls: list[Call]) -> Iterator[str]:
    """Debian's packages, which are a compiler, stay in the stage of the wheel."""
    for call in (call for call in calls if call.program == "apt-get"):
        if call.stage != "wheel":
            yield f"{call.stage}: apt-get {call.words[0]}: an image that runs needs no packages"
        if call.words[0] == "install" and "--no-install-recommends" not in call.words:
            yield f"{call.stage}: apt-get install brings what is only recommended"


def _is_pinned(call: Call) -> bool:
    """Hashes, nothing from outside, or - for torch and its libraries - versions."""
    if "--requirement" in call.words:
        return {"--require-hashes", "--no-deps"} <= set(call.words)
    return "--no-index" in call.words or _file(call, "--constraint") == CONSTRAINTS


def _file(call: Call, option: str) -> str:
    return Path(call.words[call.words.index(option) + 1]).read_text() if option in call.words else ""


def locked(text: str) -> dict[str, int]:
    """Return the requirements of a file, each with the number of its hashes."""
    entries = text.replace(" \\\n", " ").splitlines()
    return {entry.split()[0]: entry.count("--hash=sha256:") for entry in entries if not entry.startswith("#")}


def test_locked_packages_are_those_of_the_constraints() -> None:
    """`python -m deploy.lock` was run after constraints.txt had changed."""
    pins = {
        canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in CONSTRAINTS.splitlines() if "==" in line
    }
    for name, requirements in lock.sets().items():
        found = locked((lock.FOLDER / f"{name}.txt").read_text())
        assert min(found.values()) >= 1
        versions = {canonicalize_name(each.split("==")[0]): each.split("==")[1] for each in found}
        assert versions.items() <= pins.items()
        assert {canonicalize_name(Requirement(each).name) for each in requirements} <= versions.keys()


def test_locked_packages_are_complete() -> None:
    """What the installed packages of the same versions require is in the same or an earlier step."""
    before: set[str] = set()
    for name in ("services", "models"):
        found = {canonicalize_name(each.split("==")[0]) for each in locked((lock.FOLDER / f"{name}.txt").read_text())}
        needed = {required for each in found for required in requirements_of(each)}
        assert needed - found - before == set()
        before |= found


def requirements_of(name: str) -> set[str]:
    """What a package requires with this Python, and with Debian's."""
    if name in lock.BEFORE_3_11_3:
        return set()  # it may not be installed here
    wanted = map(Requirement, metadata.requires(name) or [])
    pythons = [{"extra": ""}, {"extra": "", "python_full_version": "3.11.2"}]
    return {
        canonicalize_name(each.name)
        for each in wanted
        if each.marker is None or any(each.marker.evaluate(python) for python in pythons)
    }


def test_every_image_can_be_built(built: DryBuild) -> None:
    assert {call.program for call in built.calls} == {"python3", "python", "pip", "useradd", "apt-get", "rm"}
    assert [*pip_problems(built.calls), *compiler_problems(built.calls)] == []


def test_generated_files_stay_out_of_the_build(built: DryBuild) -> None:
    assert not built.is_sent(REPOSITORY / "specdec/v1/types_pb2.py")
    assert not built.is_sent(REPOSITORY / "specdec/engine/_kernels.cpython-312-x86_64-linux-gnu.so")
    assert not built.is_sent(REPOSITORY / "specdec/__pycache__/x.pyc")
    assert not built.is_sent(REPOSITORY / ".git/config")
    assert built.is_sent(REPOSITORY / "coordinator/__main__.py")


def test_models_are_where_the_programs_look(built: DryBuild) -> None:
    for name in ("target", "draft"):
        copied = {path.name for path in (built.build(f"demo-{name}") / "models" / name).iterdir()}
        assert copied >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list((built.build("demo-coordinator") / "models").rglob("*.safetensors"))


@pytest.mark.parametrize("index", ["", "https://torch.example/cpu"])
def test_an_empty_torch_index_means_pips_default(index: str, tmp_path: Path) -> None:
    calls = dry_build(TEXT, tmp_path, TORCH_INDEX=index).calls
    [torch] = [call.words for call in calls if "torch" in call.words]
    assert (torch[torch.index("--index-url") + 1] if "--index-url" in torch else "") == index


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (":/usr/sbin:/usr/bin:/sbin:", ":/usr/bin:", "useradd: not found"),
        ("RUN python3 -m venv /opt/specdec", "RUN python -m venv /opt/specdec", "python: not found"),
        ("COPY protos", "COPY proto", "wheel: COPY proto: there is no such file"),
        ("COPY models/draft", "COPY models/train.py", "demo-draft: COPY models/train.py: there is no such file, or"),
        ("COPY deploy/requirements/services.txt", "COPY deploy/requirements/service.txt", "there is no such file"),
        ("--require-hashes", "", "services.txt is not pinned"),
        ("--constraint /constraints.txt --no-deps", "--no-deps", "worker-packages: pip install"),
        ("--no-build-isolation --check", "--check", "wheel: pip wheel fetches what is not pinned"),
        ("COPY deploy/requirements/build.txt", "COPY deploy/requirements/models.txt", "wheel: mypy-protobuf is not"),
        (" gcc libc6-dev", " libc6-dev", "the wheel has no specdec/engine/_kernels*.so"),
        (" gcc libc6-dev", " gcc", "the wheel has no specdec/engine/_kernels*.so"),
        ("COPY specdec ./specdec", "COPY specdec/*.py ./specdec/", "the wheel has no specdec/engine/_kernels*.so"),
        ("RUN apt-get update && ", "RUN ", "E: Unable to locate package gcc"),
        ("--no-install-recommends", "", "wheel: apt-get install brings what is only recommended"),
        ("RUN useradd", "RUN apt-get update && useradd", "runtime: apt-get update: an image that runs needs no"),
    ],
)
def test_mistakes_in_the_dockerfile_are_found(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in TEXT
    try:
        calls = dry_build(TEXT.replace(old, new), tmp_path).calls
        problems = [*pip_problems(calls), *compiler_problems(calls)]
    except BuildFailed as error:
        problems = [str(error)]
    assert any(expected in problem for problem in problems), problems


# The check itself.


def test_settings_of_pip_reach_the_build(tmp_path: Path) -> None:
    listed = (
        f":env:.timeout='180'\nglobal.cert='/ca.crt'\nglobal.timeout='9'\nglobal.find-links='\\n{tmp_path}\\nhttps://x'"
    )
    settings = pip_settings.parse(listed)
    words = pip_settings.build_arguments(settings, {"HTTPS_PROXY": "http://proxy"}, tmp_path)
    assert words == [
        *("--secret", f"id=pip,src={tmp_path}/pip.conf", "--secret", "id=ca,src=/ca.crt"),
        *("--build-arg", "HTTPS_PROXY"),
    ]
    lines = (tmp_path / "pip.conf").read_text().splitlines()
    assert sorted(lines) == sorted(
        ["[global]", "cert = /run/secrets/ca", "timeout = 180", f"find-links = {tmp_path}", "    https://x"]
    )


def test_folders_of_packages_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "index/simple").mkdir(parents=True)
    settings = {"extra-index-url": f"https://x/simple file://{tmp_path}/index/simple", "find-links": "/nowhere"}
    assert pip_settings.local_folders(settings) == [tmp_path / "index"]


def test_missing_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CheckFailed, match="install podman or buildah") as raised:
        choose_engine(None, tmp_path)
    assert str(raised.value) == NOTHING_BUILDS


def test_failed_command_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"^build: /bin/sh ended with exit code 127$") as raised:
        run(["/bin/sh", "-c", "no-such-program"], tmp_path / "build.log")
    assert raised.value.output.endswith("no-such-program: not found")


def generated(num_draft_tokens: int, text: str = "x") -> Generated:
    statistics = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_draft_tokens}
    return parse([{"text": text, "tokens": [1]}, {"finish": {"statistics": statistics}}])


def test_equal_texts_pass() -> None:
    compare(generated(3), generated(0))


@pytest.mark.parametrize(
    ("drafted", "plain", "expected"),
    [
        (generated(3, "y"), generated(0), "the greedy texts differ"),
        (generated(0), generated(0), "accepted no draft token"),
        (generated(3), generated(3), "or the plain one was drafted"),
    ],
)
def test_texts_that_prove_nothing_fail(drafted: Generated, plain: Generated, expected: str) -> None:
    with pytest.raises(CheckFailed, match=expected):
        compare(drafted, plain)


def test_a_generation_that_was_cut_off_fails() -> None:
    with pytest.raises(CheckFailed, match="did not reach its end"):
        parse([{"text": "x", "tokens": [1]}])
