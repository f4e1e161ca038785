"""The groups of bench/gpu.py that are of a whole model: the 4 B hybrid of gpu_shape.py, through the engine.

Beside each time stands its floor: bytes at the copy rate, or arithmetic at the rate of a large product, both of the
same run. `others` is what is known of others at the same work on one H200; it was measured before, not in this run.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gpu_shape
import torch
from gpu_engine import Batch, Bench, decode_step, first_token, runner_step
from gpu_figures import LOW, Run, seconds

from bough import Engine
from bough.cache.tree import Tier
from bough.engine.request import Usage
from bough.state.live import State
from bough.state.transaction import commit

DRAFT = 4  # tokens of a draft
ROUNDS = 5
OTHERS_DECODE = {  # by rows and context
    (1, 4096): "vLLM 3.67 ms, transformers with fla 83 ms (over 2048)",
    (16, 2048): "vLLM 4.46 ms, transformers with fla 88 ms",
    (64, 1024): "vLLM 6.57 ms, transformers with fla 80 ms",
}
OTHERS_PREFILL = {
    2048: "vLLM 87 ms, transformers with fla 90 ms",
    8192: "vLLM 132 ms, transformers with fla 202 ms",
    32768: "vLLM 583 ms, transformers with fla 866 ms",
}


def model_decode(bench: Bench) -> None:
    with bench.engine(bench.loaded()) as engine:
        for rows, context in bench.sizes.decode:
            decode_step(bench, engine, rows, context)  # compiles, and captures what there is to capture
            took, most = decode_step(bench, engine, rows, context)
            alone = engine.call(lambda: runner_step(bench, engine, rows, context))  # noqa: B023
            floor = bench.decode_floor(engine, rows, context)
            bench.figure(
                f"decode, {rows} rows over {context}", step_ms=took, longest_ms=most, tokens_s=1e3 * rows / took,
                runner_step_ms=alone, floor_ms=floor, of_floor=floor / took,
                others=OTHERS_DECODE.get((rows, context)),
            )  # fmt: skip


def model_prefill(bench: Bench) -> None:
    with bench.engine(bench.loaded()) as engine:
        for count in bench.sizes.prompts:
            times = [first_token(engine, bench.prompt(count))[0] for _ in range(ROUNDS + 2)][2:]
            floor, took = bench.prefill_floor(count), statistics.median(times)
            bench.figure(
                f"prompt of {count}, request in to first token out", ms=took, least_ms=min(times),
                most_ms=max(times), floor_ms=floor, of_floor=floor / took, tokens_s=1e3 * count / took,
                others=OTHERS_PREFILL.get(count),
            )  # fmt: skip


def model_reuse(bench: Bench) -> None:
    sizes = bench.sizes
    with bench.engine(bench.loaded(), sizes.forks + 1, sizes.host_bytes) as engine:
        reuse_prompts(bench, engine)
        reuse_host(bench, engine)
        engine.cache.clear()
        reuse_forks(bench, engine)


def reuse_prompts(bench: Bench, engine: Engine) -> None:
    """A prompt again, and two others that leave it half way."""
    count, at = bench.sizes.again, bench.sizes.diverging
    seen: dict[str, list[tuple[float, Usage]]] = {"first": [], "again": [], "leaves": [], "leaves again": []}
    for turn in range(ROUNDS + 1):
        prompt = bench.prompt(count)
        leaving = [prompt[:at] + bench.prompt(count - at) for _ in range(2)]
        for asked, each in zip((prompt, prompt, *leaving), seen.values(), strict=True):
            found = first_token(engine, asked)
            if turn:  # the first one compiles
                each.append(found)
    took = {name: statistics.median(ms for ms, _ in each) for name, each in seen.items()}
    cached = {name: min(usage.cached_tokens for _, usage in each) for name, each in seen.items()}
    bench.figure(
        f"prompt of {count} again", first_ms=took["first"], ms=took["again"], cached_tokens=cached["again"],
        floor_ms=bench.decode_floor(engine, 1, count), others="vLLM 136 ms, then 35 ms with 7,920 cached",
    )  # fmt: skip
    bench.figure(
        f"prompt of {count} that leaves a known one at {at}", ms=took["leaves"], cached_tokens=cached["leaves"],
        second_ms=took["leaves again"], second_cached_tokens=cached["leaves again"],
        floor_ms=bench.prefill_floor(count - at, at),
        others="vLLM at the full price with 0 cached, the second one 46 ms with 3,696 cached",
    )  # fmt: skip


def reuse_host(bench: Bench, engine: Engine) -> None:
    """A long conversation leaves the device and comes back."""
    count, cache = bench.sizes.long, engine._loop.cache
    host = cache.tiers.host
    assert host is not None

    def demote() -> float:
        """Bytes a µs, of all that is on the device and not on the host yet."""
        cache.tiers.lane.wait()
        before, began = host.used_bytes, time.perf_counter()
        while cache.tiers.evict(Tier.DEVICE):
            pass
        bench.run.synchronise()
        return (host.used_bytes - before) / (time.perf_counter() - began) / 1e6

    def promote(prompt: list[int]) -> tuple[float, int]:
        """Bytes a µs, and how many."""
        before, began = cache.pool.used_bytes, time.perf_counter()
        match = cache.acquire(prompt)
        bench.run.synchronise()
        took = time.perf_counter() - began
        cache.release(match)
        moved = cache.pool.used_bytes - before
        return moved / took / 1e6, moved

    down, up, sizes, firsts = list[float](), list[float](), list[int](), list[float]()
    cached = 0
    for turn in range(3):
        engine.cache.clear()
        prompt = bench.prompt(count)
        first_token(engine, prompt)
        lowered = engine.call(demote)
        raised, size = engine.call(lambda: promote(prompt))  # noqa: B023
        engine.call(demote)
        took, usage = first_token(engine, prompt)
        if turn:  # the first one touches memory that is new
            down.append(lowered)
            up.append(raised)
            sizes.append(size)
            firsts.append(took)
            cached = usage.cached_tokens
    moved = statistics.median(sizes)
    bench.figure(
        f"conversation of {count} to the host and back", demote_gb_s=statistics.median(down) / 1e3,
        promote_gb_s=statistics.median(up) / 1e3, promoted_bytes=moved, first_token_ms=statistics.median(firsts),
        cached_tokens=cached, of_copy_rate=statistics.median(up) / bench.run.host_rate,
        floor_ms=moved / bench.run.host_rate / 1e3 + bench.decode_floor(engine, 1, count),
    )  # fmt: skip


def reuse_forks(bench: Bench, engine: Engine) -> None:
    """A long conversation goes on in many ways."""
    count, ways = bench.sizes.long, bench.sizes.forks

    def fork() -> tuple[float, int, float, int, int]:
        """ms and pages of the forks; then ms, pages and slots of a first token for each."""
        batch = Batch(engine, [bench.prompt(count)])
        (state,), (token,), pool = batch.states, batch.tokens, batch.runner.pool
        assert pool.slot_store is not None
        slots, forks = pool.stores[pool.slot_store], list[State]()

        def pages() -> int:
            return sum(pool.stores[index].used for index in pool.page_stores)

        before, slots_before = pages(), slots.used
        forking = seconds(lambda: forks.extend(state.fork() for _ in range(ways)))
        forked = pages()
        batch.states, batch.tokens = forks, [token] * ways
        writing = seconds(batch.decode)
        found = 1e3 * forking, forked - before, 1e3 * writing, pages() - forked, slots.used - slots_before
        batch.close()
        state.release()
        return found

    found = [engine.call(fork) for _ in range(ROUNDS + 1)][1:]
    forking, copied, writing, pages, slots = (statistics.median(each) for each in zip(*found, strict=True))
    bench.figure(
        f"conversation of {count}, {ways} forks", ms=forking, pages_copied=copied, first_step_ms=writing,
        first_step_pages=pages, first_step_slots=slots, floor_ms=bench.decode_floor(engine, ways, count),
    )  # fmt: skip


def model_draft(bench: Bench) -> None:
    """Rounds of one token and a draft, of which all stands or nothing: each launched before the one before is read, as
    they are where a drafter can say what follows; and (`waited`) each after that, as others need it."""
    with bench.engine(bench.loaded()) as engine:
        for rows, context in bench.sizes.draft:
            plain = engine.call(lambda: runner_step(bench, engine, rows, context))  # noqa: B023
            floor = bench.decode_floor(engine, rows, context)
            for kept in (1 + DRAFT, 1):
                engine.call(lambda: rounds_of(bench, engine, rows, context, kept))  # noqa: B023 (compiles)
                found = engine.call(lambda: rounds_of(bench, engine, rows, context, kept))  # noqa: B023
                waited, launching, committing = found
                whole = waited  # on a CPU there are no others
                if bench.run.on_gpu:
                    whole = engine.call(lambda: rounds_after_rounds(bench, engine, rows, context, kept))  # noqa: B023
                bench.figure(
                    f"round of 1 + {DRAFT}, {rows} rows over {context}, {'all' if kept > 1 else 'nothing'} stands",
                    round_ms=whole, waited_ms=waited, launch_ms=launching, commit_ms=committing, plain_step_ms=plain,
                    of_plain_step=whole / plain, floor_ms=floor, tokens_s=1e3 * rows * kept / whole,
                )  # fmt: skip


def rounds_of(bench: Bench, engine: Engine, rows: int, context: int, kept: int) -> tuple[float, float, float]:
    """Mean ms from one round to the next, since slots are written in some; median ms of the host until it is launched,
    and of the commits."""
    batch, count = Batch(engine, [bench.prompt(context) for _ in range(rows)]), bench.sizes.steps // 2
    drafts, begun = [bench.prompt(DRAFT) for _ in range(count)], list[float]()
    launches, commits = list[float](), list[float]()
    for draft in drafts:
        begun.append(time.perf_counter())
        opened = batch.round(draft)
        fed = time.perf_counter()
        commit([(transaction, kept) for transaction in opened])
        launches.append(batch.launched - begun[-1])
        commits.append(time.perf_counter() - fed)
    batch.close()
    launching, committing = (1e3 * statistics.median(each[count // 4 :]) for each in (launches, commits))
    whole = statistics.fmean(end - begin for begin, end in pairwise(begun[count // 4 :]))
    return 1e3 * whole, launching, committing


def rounds_after_rounds(bench: Bench, engine: Engine, rows: int, context: int, kept: int) -> float:
    """Mean ms from one round to the next, where each is launched before the one before is read."""
    batch, count = Batch(engine, [bench.prompt(context) for _ in range(rows)]), bench.sizes.steps
    read = batch.follow([bench.prompt(DRAFT) for _ in range(count)], kept)[count // 4 :]
    batch.close()
    return 1e3 * (read[-1] - read[0]) / (len(read) - 1)


def model_start(bench: Bench) -> None:
    """Processes that load a model folder, of which the system has all in memory, and write a token.

    The first one compiles the kernels.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        size = gpu_shape.write(bench.tensors(), folder, tiny=bench.tiny)
        gc.collect()
        if bench.run.on_gpu:
            torch.cuda.empty_cache()
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": str(here.parent), "TRITON_CACHE_DIR": f"{scratch}/triton"}

        def started(*command: str) -> tuple[float, str]:
            began = time.time()
            told = subprocess.run([sys.executable, *command], env=environment, check=True, stdout=subprocess.PIPE)
            return began, told.stdout.decode()

        torch_s = seconds(lambda: started("-c", "import torch"))
        for name in ("first start", "second start"):
            began, told = started(str(here / "gpu_start.py"), str(folder), str(bench.run.device))
            at = {key: each - began for key, each in json.loads(told.splitlines()[-1]).items()}
            bench.figure(
                f"{name}, process to first token", s=at["first_token"], import_s=at["imported"],
                load_s=at["loaded"] - at["imported"], token_s=at["first_token"] - at["loaded"], import_torch_s=torch_s,
                copy_s=size / bench.run.host_rate / 1e6, others="vLLM to ready 137 s",
            )  # fmt: skip


def model_quant(bench: Bench) -> None:
    """Weights of 8 and 4 bits beside bfloat16."""
    drawn, plain = bench.tensors(), dict[tuple[int, int], float]()
    for scheme in ("bfloat16", "int4", "int8"):
        made = drawn if scheme == "bfloat16" else gpu_shape.quantised(drawn, scheme, tiny=bench.tiny)
        with bench.engine(gpu_shape.loaded(made, bench.run.device, tiny=bench.tiny), running=16) as engine:
            for rows, context in bench.sizes.quant:
                decode_step(bench, engine, rows, context)
                took, _ = decode_step(bench, engine, rows, context)
                plain.setdefault((rows, context), took)
                floor = bench.decode_floor(engine, rows, context)
                bench.figure(
                    f"decode in {scheme}, {rows} rows over {context}", step_ms=took, floor_ms=floor,
                    of_floor=floor / took, times_bfloat16=plain[rows, context] / took,
                    weight_bytes=engine.model.weight_bytes,
                )  # fmt: skip


@torch.inference_mode()
def model_peer(bench: Bench) -> None:
    """transformers, as its plain forward goes, with fla where that is on the path."""
    import transformers
    from transformers.utils.import_utils import is_flash_linear_attention_available

    config = gpu_shape.config(tiny=bench.tiny)
    with bench.run.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=LOW).eval()

    def feed(tokens: list[int], cache: transformers.DynamicCache) -> int:
        given = torch.tensor([tokens], device=bench.run.device)
        return int(model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    fla = "with" if is_flash_linear_attention_available() else "without"
    told = {"peer": f"transformers {transformers.__version__} {fla} fla"}
    for count in bench.sizes.peer_prompts:
        times = [
            seconds(lambda: feed(bench.prompt(count), transformers.DynamicCache(config=config)))  # noqa: B023
            for _ in range(ROUNDS + 2)
        ]
        took = 1e3 * statistics.median(times[2:])
        bench.figure(f"prompt of {count}, transformers", ms=took, floor_ms=bench.prefill_floor(count), **told)
    context, cache = bench.sizes.decode[0][1], transformers.DynamicCache(config=config)
    token = feed(bench.prompt(context), cache)
    times = [seconds(lambda: feed([token], cache)) for _ in range(16)]
    bench.figure(f"decode, 1 row over {context}, transformers", step_ms=1e3 * statistics.median(times[4:]), **told)


def group(work: Callable[[Bench], None]) -> Callable[[Run], None]:
    return lambda run: work(Bench(run))


GROUPS: dict[str, Callable[[Run], None]] = {
    work.__name__: group(work)
    for work in (model_decode, model_prefill, model_reuse, model_draft, model_start, model_quant, model_peer)
}
