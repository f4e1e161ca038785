"""Kernels in CUDA C++ run on the host (host.cuh), so that a change that breaks one is seen without a device."""

import ctypes
import hashlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
OPTIONS = ["-std=c++20", "-O2", "-shared", "-fPIC", "-w", "-Wno-psabi"]


class _Told(ctypes.Structure):
    _fields_ = (
        ("arguments", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("blocks", "threads", "cluster", "bytes", "seed", "late", "ranges")),
        *((name, ctypes.c_void_p) for name in ("range", "awaited", "written")),
        ("awaited_bytes", ctypes.c_uint64),
    )


def _encode(into, dtype, dims, at, sizes, strides, box, steps, interleave, swizzle, promotion, fill) -> int:
    """What copies read a matrix by (Map of host.cuh), in the place of the driver's."""
    assert (set(steps), interleave, swizzle, fill) == ({1}, 0, 3, 0)
    far, few = [*strides, *[0] * (5 - dims)], [*sizes, *[0] * (5 - dims), *box, *[0] * (5 - dims)]
    told = struct.pack("5Q12I", at.value, *far, *few, dims, {7: 4, 9: 2}[dtype])
    ctypes.memmove(into, told, len(told))
    return 0


class Host:
    """What kernels are launched on. `read` are the tensors that they may copy from; what `awaited` holds is there only
    once a kernel has waited for the launch before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seed, self.late, self.cluster = folder, 0, False, 1
        self.read: Sequence[torch.Tensor] = ()
        self.awaited: torch.Tensor | None = None
        self.launches = 0

    @contextmanager
    def stands_in(self, made: Any, processors: int, **others: object) -> Iterator[None]:
        """For the device, in the module of what keeps the kernels that were `made`."""
        with pytest.MonkeyPatch.context() as patch:
            counted = {"able": lambda _: True, "processors": lambda _: processors, "kernel": self.kernel}
            for name, value in {**counted, **others}.items():
                patch.setattr(sys.modules[made.__module__], name, value)
            from bough.ops.triton import native

            patch.setattr(native, "cuda", lambda: SimpleNamespace(cuTensorMapEncodeTiled=_encode))
            for each in (made, native.map_of):
                each.cache_clear()
            yield
            for each in (made, native.map_of):
                each.cache_clear()

    def kernel(self, name: str, source: str, shared: int, device: torch.device) -> "Kernel":
        return Kernel(self, name, source, shared)


class Kernel:
    """The twin of native.Kernel."""

    def __init__(self, host: Host, name: str, source: str, shared: int) -> None:
        from bough.ops.triton import native

        here, words = Path(__file__).parent, Path(native.__file__).with_name("ptx.cuh").read_text()
        assert source.count(words) == 1
        entry = f'extern "C" const char* run(const host::Told& told) {{ return host::run({name}, told); }}\n'
        text = source.replace(words, (here / "host.cuh").read_text()) + entry
        made = host.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        if not made.exists():
            path = made.with_suffix(".cpp")
            path.write_text(text)
            assert COMPILER is not None
            subprocess.run([COMPILER, *OPTIONS, "-o", made, path], check=True)
        self._run, self._host, self._shared = ctypes.CDLL(str(made)).run, host, shared
        self._run.restype, self._run.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def launch(self, blocks: int, threads: int, told: Sequence, *, overlaps: bool = False) -> None:
        host = self._host
        host.launches += 1
        ranges = [end for each in host.read for end in _bounds(each)]
        arguments = (ctypes.c_void_p * len(told))(*map(ctypes.addressof, told))
        written = host.awaited.clone() if overlaps and host.awaited is not None else None
        bounds = (ctypes.c_void_p * len(ranges))(*ranges)
        at = _Told(
            ctypes.addressof(arguments), blocks, threads, host.cluster, self._shared, host.seed, host.late,
            len(ranges) // 2, ctypes.addressof(bounds),
        )  # fmt: skip
        if written is not None:
            host.awaited.fill_(torch.nan)
            at.awaited, at.written, at.awaited_bytes = host.awaited.data_ptr(), written.data_ptr(), written.nbytes
        fault = self._run(ctypes.byref(at))
        assert fault is None, fault.decode()


def _bounds(of: torch.Tensor) -> tuple[int, int]:
    storage = of.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
