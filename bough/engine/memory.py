"""How much memory this machine has to spare."""

import os
from pathlib import Path

import torch


def spare_bytes(device: torch.device) -> int:
    """Memory that state may take by default: most of what is free on a GPU, a quarter of it on a shared machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.8)
    return available_bytes() // 4


def available_bytes() -> int:
    """Memory of this machine that others leave. Where it does not say: half of what it has, or 1 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 1 << 30
