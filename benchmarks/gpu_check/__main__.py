"""`make gpu-check`: compare a GPU with the CPU, test the law, measure speeds, and write one report.

Without a GPU, or with `--device cpu`, it is a dry run: the same code on models that a CPU computes in a minute.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_check import equality, speed
from benchmarks.gpu_check.equality import check_equality
from benchmarks.gpu_check.kernels import check_kernels
from benchmarks.gpu_check.law import check_law
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from specdec.engine.pretrained import choose_device

NUM_TEXTS, NUM_DRY_TEXTS = 4000, 600  # a law: 4000 see a total variation of some 0.05
REPORT = Path("docs/gpu-check.md")


def main() -> None:
    """Write the report; exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--report", type=Path, default=REPORT, help=f"where it is written (default: {REPORT})")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no measurement begins (default: 8)")
    flags = parser.parse_args()
    began = time.perf_counter()
    report = checked(Place(choose_device(flags.device).type), began + 60 * flags.minutes)
    flags.report.parent.mkdir(parents=True, exist_ok=True)
    flags.report.write_text(report.markdown(time.perf_counter() - began))
    print(f"{'every check held' if report.holds else 'checks failed'}: {flags.report}")
    sys.exit(not report.holds)


def checked(place: Place, end_s: float) -> Report:
    """Return the report on a device; what is still to be measured at `end_s` is left out."""
    report = Report(place.describe(), place.is_dry)
    print(report.place, flush=True)
    check_kernels(place, report)
    check_equality(place, report, equality.DRY if place.is_dry else equality.FULL)
    check_law(place, report, NUM_DRY_TEXTS if place.is_dry else NUM_TEXTS)
    if not place.is_dry:
        torch.cuda.empty_cache()
    with report.part("speed"):
        speed.measure(place, report, speed.DRY if place.is_dry else speed.FULL, end_s)
    return report


if __name__ == "__main__":
    main()
