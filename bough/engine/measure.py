"""What a model needs to run here: the peak memory of its activations, and how much state fits beside them."""

import os
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bough.engine.runner import Runner
from bough.state import capacity

LONG_ROWS = 4  # attention takes rows one by one: a few of full length show the peak of any number


@dataclass(frozen=True, slots=True)
class Fit:
    """What a reserve run found out."""

    weight_bytes: int
    activation_bytes: int  # the most that a step takes besides weights and state
    state_bytes: int  # the pool
    step_tokens: int  # of the largest step that was measured
    longest: int  # tokens that a single sequence can reach
    sequences: dict[int, int]  # length → how many sequences of it fit at once


def reserve(runner: Runner, *, step_tokens: int, context: int, max_running: int) -> Fit:
    """Run the largest steps there can be over made-up tokens, and tell what fits. No sequence is touched."""
    layouts, slabs = [pool.layout for pool in runner.pool.arena.pools], runner.pool.slabs
    longest = capacity.tokens_that_fit(layouts, slabs, step_tokens, max_running, context)
    prompt = min(step_tokens, longest)
    writing = min(step_tokens, max_running)
    histories = [longest - 1 if row < LONG_ROWS else 0 for row in range(writing)]
    shapes = [([prompt], [longest - prompt]), ([1] * writing, histories)]
    peak = max(peak_bytes(runner, counts, history) for counts, history in shapes)
    lengths = sorted({length for length in (1024, 4096, 16384, 65536, longest) if 0 < length <= longest})
    fits = {n: capacity.sequences_that_fit(layouts, slabs, n, step_tokens, max_running) for n in lengths}
    return Fit(runner.model.weight_bytes, peak, runner.pool.nbytes, max(prompt, writing), longest, fits)


def peak_bytes(runner: Runner, counts: list[int], history: list[int]) -> int:
    """The most memory that a forward of this shape holds at once, beyond what was held before it."""
    device = runner.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner.rehearse(counts, history)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes of its comings and goings to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        runner.rehearse(counts, history)
    held = peak = 0
    assert seen.profiler is not None
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
