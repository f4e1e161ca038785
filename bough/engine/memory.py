"""How much memory this machine has to spare, and the pools for state that are made of it."""

import os
from pathlib import Path

import torch

from bough.config import CacheConfig
from bough.draft import Drafter
from bough.errors import PoolFull
from bough.models.load import DTYPES
from bough.models.model import Model
from bough.state import capacity
from bough.state.kinds import FullKV, Kind, ShortConv, SlotKind
from bough.state.layout import layouts
from bough.state.pool import Pool

MAX_RUNNING = 64
IDLE = 4  # times what all running sequences can take is enough for those and the idle ones


def pools(
    model: Model,
    drafter: Drafter | None,
    cache: CacheConfig,
    *,
    context: int,
    step_tokens: int,
    max_running: int | None,
) -> tuple[Pool, Pool | None, int | None]:
    """The memory for state, for the drafter's too if it keeps some, as far as neither size nor number was given.

    A drafter that lags behind goes on from the target's last hidden row, which slots then keep: the third value is the
    layer it is kept as.
    """
    kinds: list[Kind | None] = list(model.kinds)
    last_layer = None
    if drafter is not None and drafter.lag and any(isinstance(kind, SlotKind) for kind in kinds):
        last_layer = len(kinds)
        kinds.append(ShortConv(model.hidden_size, kernel=2))
    drafted = [list(drafter.kinds)] if drafter is not None and drafter.kinds else []
    # Those that cannot be taken back token by token draft on a fork.
    forks = 1 if all(isinstance(kind, FullKV | None) for each in drafted for kind in each) else 2
    kv_dtype = None if cache.dtype == "auto" else DTYPES[cache.dtype]
    made = layouts([kinds, *drafted], page_tokens=cache.page_tokens, dtype=model.dtype, kv_dtype=kv_dtype)

    def needed(sequences: int, tokens: int, running: int) -> int:
        numbers = [running, *[forks * running] * len(drafted)]
        slabs = [capacity.slabs(each, sequences, tokens, step_tokens, n) for each, n in zip(made, numbers, strict=True)]
        return sum(slabs) * made[0].slab_bytes

    nbytes = cache.device_bytes
    if nbytes is None:
        most = needed(max_running or MAX_RUNNING, context, max_running or MAX_RUNNING)
        most *= IDLE if cache.enabled else 1
        nbytes = min(most, max(spare_bytes(model.device), min(needed(1, context, 1), 1 << 30)))
    if max_running is None:  # slots for all that run are kept back, so leave room for pages
        room, some = nbytes, min(context, 4096)
        max_running = max(1, capacity.largest(MAX_RUNNING, lambda running: needed(1, some, running) <= room))
    try:
        pool = Pool(made[0], nbytes, device=model.device, max_running=max_running)
    except (RuntimeError, MemoryError):
        raise PoolFull(
            f"{nbytes:,} bytes for state cannot be had on {model.device};"
            " ask for less (CacheConfig.device_bytes, or --cache-bytes)"
        ) from None
    beside = Pool(made[1], max_running=forks * max_running, beside=pool) if drafted else None
    return pool, beside, last_layer


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
