"""What the benches of a GPU share: where figures go, what the device can do at most, and ways to take times."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from triton.testing import do_bench

LOW = torch.bfloat16


class Run:
    """Where figures go, with what they are held against. Without `out` they are only printed.

    On a CPU, where whole models can be tried at a tiny shape, ceilings are of small works and say little.
    """

    def __init__(self, out: Path | None, peers: Path | None, device: str = "cuda") -> None:
        self.out, self.peers, self.device = out, peers, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        if peers is not None:
            sys.path.append(str(peers))
        source = torch.randn(2**29 if self.on_gpu else 2**20, device=self.device)
        target = torch.empty_like(source)
        self.rate = 2 * source.nbytes / self.timed(lambda: target.copy_(source))  # bytes a µs
        name = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        self.machine = {"device": name, "torch": torch.__version__}
        self.figure(f"copy of {'2 GiB' if self.on_gpu else '4 MiB'}", tb_s=self.rate / 1e6)

    @cached_property
    def flops(self) -> float:
        """Of a large product in bfloat16, a µs."""
        size = 8192 if self.on_gpu else 256
        a, b = (torch.randn(size, size, device=self.device, dtype=LOW) for _ in range(2))
        rate = 2 * size**3 / self.timed(lambda: a @ b)
        self.figure(f"bfloat16 product of {size}³", tflop_s=rate / 1e6)
        return rate

    @cached_property
    def host_rate(self) -> float:
        """Bytes a µs from pinned memory to the device."""
        source = torch.empty(2**30 if self.on_gpu else 2**20, dtype=torch.uint8, pin_memory=self.on_gpu)
        target = torch.empty_like(source, device=self.device)
        rate = source.nbytes / self.timed(lambda: target.copy_(source, non_blocking=True))
        self.figure("copy from pinned memory", gb_s=rate / 1e3)
        return rate

    def timed(self, work: Callable[[], object]) -> float:
        """µs of a work on the device, without its launch."""
        return eager(work) if self.on_gpu else 1e6 * statistics.median(seconds(work) for _ in range(5))

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def figure(self, name: str, **values: float | str | None) -> None:
        rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
        line = json.dumps({"figure": name, **rounded, **self.machine}, ensure_ascii=False)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")

    def peer(self, name: str) -> Callable | None:
        if self.peers is None:
            return None
        import fla.ops.gated_delta_rule

        return getattr(fla.ops.gated_delta_rule, name)


def seconds(work: Callable[[], object]) -> float:
    """Of a work that waits for the device itself."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def eager(work: Callable[[], object]) -> float:
    """µs."""
    return do_bench(work, warmup=20, rep=100, return_mode="median") * 1e3


def graph(work: Callable[[], object]) -> float:
    """Median µs of one of the calls that a graph makes one after the other."""
    torch.cuda.synchronize()  # it is captured on a stream of its own, which does not wait for the inputs
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(what: Callable[[], object]) -> float:
        begin.record()
        what()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    with torch.cuda.stream(stream):
        work()  # compiled, and with whatever a stream has of its own
        once = timed(work)
        count = max(1, min(200, int(10 / once)))
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            for _ in range(count):
                work()
        captured.replay()
        return statistics.median(timed(captured.replay) for _ in range(11)) / count * 1e3
