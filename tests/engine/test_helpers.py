"""Helpers take parts of products, change no bit, and are never waited for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from torch import nn

from specdec.engine.helpers import count_parts, rest, set_helpers
from specdec.engine.linear import MIN_FLOAT32_LANES, KernelLinear
from specdec.engine.native import has_bytes, has_pairs, kernels, num_lanes
from specdec.engine.quantized import KernelInt8Linear
from tests.engine.helping import helpers, until_helped
from tests.engine.kernel import NO_KERNEL

NUM_OUT = 3000  # no whole block
ROWS = [1, 2, 9, 14, 15, 16, 33, 70]
KINDS = {  # number type, inputs: of whole tiles of a matrix unit, or not
    "bfloat16 in tiles": (torch.bfloat16, 384),
    "bfloat16": (torch.bfloat16, 130),
    "float32": (torch.float32, 131),
    "float32, halved": (torch.float32, 386),
    "int8 in tiles": (torch.bfloat16, 384),
    "int8": (torch.float32, 180),
}
SCHED_POLICY = 38  # field of /proc/PID/stat, counted after the name
WAIT_S = 60
Layer = KernelLinear | KernelInt8Linear

if kernels() is None or num_lanes() < MIN_FLOAT32_LANES:
    pytest.skip(NO_KERNEL, allow_module_level=True)


@pytest.fixture(params=list(KINDS))
def layer(request: pytest.FixtureRequest) -> Layer:
    """A layer of a kind, with a bias."""
    dtype, num_in = KINDS[request.param]
    torch.manual_seed(num_in)
    linear = nn.Linear(num_in, NUM_OUT).to(dtype).eval()
    if request.param.endswith("halved"):
        linear.weight = nn.Parameter(linear.weight.detach().bfloat16().float())
    if request.param.startswith("int8"):
        if not has_bytes():
            pytest.skip("this processor has no instructions for our kernel of bytes")
        return KernelInt8Linear(linear.weight.detach(), linear.bias.detach())
    if dtype == torch.bfloat16 and not has_pairs():
        pytest.skip("this processor has no instructions for our kernel of bfloat16")
    return KernelLinear(linear)


def rows_of(layer: Layer, num_rows: int) -> torch.Tensor:
    """Return some rows for a layer."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, layer.in_features, generator=generator).to(layer.dtype)


@contextmanager
def busy_processors() -> Iterator[None]:
    """Let every processor have something else to do."""
    with ExitStack() as at_end:
        for _ in range(len(os.sched_getaffinity(0))):
            process = at_end.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            at_end.callback(process.kill)
        yield


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("num_helpers", [1, 3])
def test_products_have_the_same_bits(layer: Layer, num_rows: int, num_helpers: int) -> None:
    rows = rows_of(layer, num_rows)
    alone = layer(rows)
    with helpers(num_helpers):
        for _ in until_helped(20):
            assert torch.equal(layer(rows), alone)


@torch.inference_mode()
def test_nobody_waits_for_a_helper_without_a_processor(layer: Layer) -> None:
    """One that loses its processor within a part goes on when another job is under way, and spoils neither."""
    many, few = rows_of(layer, 33), rows_of(layer, 3)
    alone = [(many, layer(many)), (few, layer(few))]
    with busy_processors(), helpers(2):
        until, (_, before) = time.monotonic() + WAIT_S, count_parts()
        while count_parts()[1] == before:
            assert time.monotonic() < until, "no part came too late"
            for rows, expected in alone:
                assert torch.equal(layer(rows), expected)


@torch.inference_mode()
def test_several_threads_may_multiply_at_once(layer: Layer) -> None:
    rows = [rows_of(layer, count) for count in ROWS]
    alone = [layer(some) for some in rows]
    with helpers(2), ThreadPoolExecutor(4) as threads:
        for products in [list(threads.map(layer, rows)) for _ in range(20)]:
            assert all(torch.equal(*pair) for pair in zip(products, alone, strict=True))


def test_helpers_have_the_lowest_priority() -> None:
    def policies() -> list[int]:
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat") if path.exists()]
        return [int(stat.rpartition(")")[2].split()[SCHED_POLICY]) for stat in stats]

    def wait_for(count: int) -> None:
        until = time.monotonic() + WAIT_S
        while policies().count(os.SCHED_IDLE) != count:
            assert time.monotonic() < until
            time.sleep(0.01)

    wait_for(0)
    with helpers(3):
        wait_for(3)
    wait_for(0)


def test_weights_may_go_while_helpers_are_late() -> None:
    """What a helper still reads is freed only afterwards; the weight here is unmapped then."""
    with busy_processors(), helpers(2), torch.inference_mode():
        for _ in range(3):
            own = KernelLinear(nn.Linear(1024, 12_288).eval())  # 50 MB: more than is ever kept for others
            rows, until, (_, before) = rows_of(own, 9), time.monotonic() + WAIT_S, count_parts()
            while count_parts()[1] == before:
                assert time.monotonic() < until, "no part came too late"
                own(rows)
            del own


def test_a_fork_has_no_helpers(layer: Layer) -> None:
    rows = rows_of(layer, 5)
    alone = layer(rows)
    with helpers(2):
        layer(rows)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(layer(rows), alone) and set_helpers(0) == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(layer(rows), alone)


def test_a_fork_beside_a_job_may_have_helpers_of_its_own(layer: Layer) -> None:
    """A job that another thread was writing, and parts that helpers had begun, are not the child's."""
    rows, ending = rows_of(layer, 5), Event()
    alone = layer(rows)

    def go_on() -> None:
        with torch.inference_mode():
            while not ending.is_set():
                layer(rows)

    with helpers(2):
        thread = Thread(target=go_on)
        thread.start()
        children = [_helped_child(layer, rows, alone) for _ in range(20)]
        ending.set()
        thread.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 20


def _helped_child(layer: Layer, rows: torch.Tensor, alone: torch.Tensor) -> int:
    """Return the number of a child that ends with 0 if a helper of its own did a part of what it computes."""
    child = os.fork()
    if not child:
        try:
            with helpers(1), torch.inference_mode():
                is_right = all(torch.equal(layer(rows), alone) for _ in until_helped(5))
                rest()
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    return child


def test_a_process_with_helpers_ends() -> None:
    program = (
        "import torch; from torch import nn; from specdec.engine.linear import MIN_FLOAT32_LANES, KernelLinear\n"
        "from specdec.engine.helpers import set_helpers\n"
        "set_helpers(3); layer = KernelLinear(nn.Linear(512, 4096))\n"
        "with torch.inference_mode(): layer(torch.zeros(9, 512))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@torch.inference_mode()
def test_helpers_treat_the_smallest_numbers_as_the_jobs_thread_does() -> None:
    layer = KernelLinear(nn.Linear(256, 2048, bias=False).eval())
    rows = torch.full((4, 256), 1e-38)
    with helpers(1):
        torch.set_flush_denormal(True)
        try:
            for _ in until_helped(20):
                assert not layer(rows).any()
        finally:
            torch.set_flush_denormal(False)


def test_signals_are_not_for_helpers() -> None:
    """A signal that a helper took would wait for it."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with helpers(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
