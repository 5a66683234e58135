"""Build the images, print their sizes, generate through them; one sentence and exit code 1 if anything fails."""

import argparse
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from deploy.image_check import debian, pip_settings
from deploy.image_check.engine import Engine, choose_engine
from deploy.image_check.generation import DEMO_IMAGES, Generated, compare, generate_through
from deploy.image_check.processes import CheckFailed

REPOSITORY = Path(__file__).parents[2]


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(prog="image-check", description=__doc__)
    parser.add_argument("images", nargs="+", help="stages of deploy/Dockerfile to build")
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"), help="default: the first that works")
    parser.add_argument("--base", help="base image; `debootstrap` makes one (default: the Dockerfile's PYTHON_IMAGE)")
    parser.add_argument("--torch-index", help="empty: pip's own index (default: the Dockerfile's TORCH_INDEX)")
    parser.add_argument("--store", type=Path, help="where buildah keeps images (default: a folder that is removed)")
    return parser.parse_args()


@contextmanager
def working_folder() -> Iterator[Path]:
    """Return a folder for everything that is written, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="specdec-image-check-") as folder:
        yield Path(folder)


def build_arguments(engine: Engine, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return what all builds have in common. Raises CheckFailed."""
    words, folders = pip_settings.of_this_machine(folder)
    if folders and not engine.mounts_folders:
        raise CheckFailed(f"pip here reads {folders[0]}, which {engine.name} build cannot mount; use podman or buildah")
    base = debian.make_base(engine, folder) if options.base == "debootstrap" else options.base
    arguments = {"PYTHON_IMAGE": base, "TORCH_INDEX": options.torch_index}
    given = [
        word for name, value in arguments.items() if value is not None for word in ("--build-arg", f"{name}={value}")
    ]
    return ["--file", str(REPOSITORY / "deploy/Dockerfile"), *words, *pip_settings.volumes(folders), *given]


def build(engine: Engine, names: list[str], arguments: list[str], folder: Path) -> dict[str, str]:
    """Build the images and print the table; return their tags by stage. Raises CheckFailed."""
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    tags = {name: f"specdec-{name}:{version}" for name in names}
    print(f"  {'image':<20}{'size':>10}{'build':>10}", flush=True)
    for name, tag in tags.items():
        started = time.monotonic()
        engine.build([*arguments, "--target", name, "--tag", tag, str(REPOSITORY)], folder / f"build of {name}.log")
        print(f"  {name:<20}{engine.size(tag):>10}{time.monotonic() - started:>8.1f} s", flush=True)
    return tags


def describe(name: str, generated: Generated) -> str:
    """Return a generation's figures as a line."""
    figures = generated.statistics
    return (
        f"  {name:<9}{len(generated.tokens)} tokens in {figures['num_rounds']} rounds and {figures['total_s']:.2f} s, "
        f"{figures['num_accepted_tokens']} of {figures['num_draft_tokens']} draft tokens accepted"
    )


def check(options: argparse.Namespace, folder: Path) -> None:
    """Do it all. Raises CheckFailed."""
    if missing := sorted(set(DEMO_IMAGES) - set(options.images)):
        raise CheckFailed(f"nothing can be generated without {', '.join(missing)}; name them too")
    with closing(choose_engine(options.engine, options.store or folder)) as engine:
        build_and_generate(engine, options, folder)


def build_and_generate(engine: Engine, options: argparse.Namespace, folder: Path) -> None:
    """Build, print the table, and compare two texts. Raises CheckFailed."""
    started = time.monotonic()
    arguments = build_arguments(engine, options, folder)
    print(f"{engine.version()}, base {options.base or 'of the Dockerfile'} after {time.monotonic() - started:.1f} s")
    tags = build(engine, options.images, arguments, folder)
    drafted, plain = generate_through(engine, tags, folder)
    print(
        f"generated through the images: {drafted.text!r}",
        describe("drafted", drafted),
        describe("plain", plain),
        sep="\n",
    )
    compare(drafted, plain)
    print("the greedy texts are the same")


def main() -> None:
    """Run the check; a signal to end also ends what was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with working_folder() as folder:
        try:
            check(parse_arguments(), folder)
        except CheckFailed as error:
            sys.exit("\n".join(filter(None, [error.output, f"image-check: {error}"])))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
