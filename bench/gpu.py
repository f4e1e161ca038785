"""Kernels and a whole model on one CUDA device, beside their ceilings and, where there is one, a peer in the same run.

    PYTHONPATH=. python bench/gpu.py [--groups delta_decode,attention_decode,delta_prefill] [--peers DIR] [--out FILE]
    PYTHONPATH=. python bench/gpu.py --groups model_decode,model_prefill,model_reuse
    PYTHONPATH=. python bench/gpu.py --tiny     the groups of whole models, at a tiny shape on a CPU, to see them work

A group of kernels takes a minute or two, compilation included; those of a whole model (gpu_model.py) some minutes. The
ceiling is what a copy of 2 GiB moves in the same run, bytes read and written together, and for prefill the time that
its inputs and outputs take at that rate. The peer is fla-core (`--peers`: a folder with its unpacked wheel). Inputs are
random. Times are medians of event timings with a cold cache (`eager`), or of graph replays (`graph`), which leave the
launches of several kernels out. Errors are relative to float64, by norm. Each figure is one JSON line.
"""

import argparse
from pathlib import Path

import gpu_model
import torch
from gpu_figures import LOW, Run, eager, graph
from torch import Tensor

from bough import ops
from bough.ops import Pages, Rows, Slots
from bough.ops import triton as kernels

DEVICE = "cuda"
K_HEADS, HEADS, WIDTH = 16, 32, 128  # of gated-delta layers of 4 B hybrids


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def delta_inputs(total: int, k_heads: int = K_HEADS) -> tuple[Tensor, ...]:
    q, k = (torch.randn(total, k_heads, WIDTH, device=DEVICE, dtype=LOW) for _ in range(2))
    v = torch.randn(total, HEADS, WIDTH, device=DEVICE, dtype=LOW)
    return q, k, v, -0.1 * torch.rand(total, HEADS, device=DEVICE), torch.rand(total, HEADS, device=DEVICE)


def delta_states(count: int) -> Tensor:
    """Slots as a pool has them: other parts lie between those of a layer."""
    size = HEADS * WIDTH * WIDTH
    return torch.randn(count, size + 3 * 8192, device=DEVICE)[:, :size].view(count, HEADS, WIDTH, WIDTH)


def exact_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One row by the rule as it is written, in float64: the outputs and the last state."""
    q, k, v, g, beta, state = (each.double() for each in (q, k, v, g, beta, state))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(v.shape[1] // q.shape[1], 1) for each in (q, k))
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * change[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) * WIDTH**-0.5
    return out, state


def delta_decode(run: Run) -> None:
    """One token a row, and draft windows, from one slot to another."""
    data, order = delta_states(140), torch.randperm(140).tolist()
    peer = run.peer("fused_recurrent_gated_delta_rule")
    for rows, tokens in ((1, 1), (16, 1), (64, 1), (1, 5), (64, 5), (64, 8)):
        inputs, shape = delta_inputs(rows * tokens), Rows((tokens,) * rows, (1,) * rows)
        slots = Slots(data, tuple(order[:rows]), tuple(order[rows : 2 * rows]))
        exact, _ = exact_delta(*(each[:tokens] for each in inputs), data[order[0]])
        ours = kernels.gated_delta(*inputs, shape, stored=slots).out
        took = graph(lambda: kernels.gated_delta(*inputs, shape, stored=slots))  # noqa: B023
        floor = 2 * rows * data[0].nbytes / run.rate
        theirs = None
        if peer is not None:
            q, k, v, g, beta = (each.view(rows, tokens, *each.shape[1:]) for each in inputs)
            states = torch.randn(rows, HEADS, WIDTH, WIDTH, device=DEVICE)
            theirs = graph(
                lambda: peer(
                    q, k, v, g, beta=beta, initial_state=states, output_final_state=True,  # noqa: B023
                    use_qk_l2norm_in_kernel=True,
                )
            )  # fmt: skip
        run.figure(
            f"gated-delta decode, {rows} rows of {tokens}", graph_us=took, floor_us=floor, of_copy_rate=floor / took,
            fla_graph_us=theirs, error=error(ours[:tokens], exact),
        )  # fmt: skip
    delta_layer(run, data, order)


def delta_layer(run: Run, data: Tensor, order: list[int]) -> None:
    """Gates, rule and norm, of one token a row."""
    channels = 2 * K_HEADS * WIDTH + HEADS * WIDTH
    layer = ops.DeltaLayer(
        -torch.rand(HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE),
        torch.randn(WIDTH, device=DEVICE, dtype=LOW), 1e-6,
    )  # fmt: skip
    for rows in (1, 16, 64):
        projected = [
            torch.randn(rows, width, device=DEVICE, dtype=LOW) for width in (channels, HEADS * WIDTH, HEADS, HEADS)
        ]
        shape, slots = Rows((1,) * rows, (1,) * rows), (tuple(order[:rows]), tuple(order[rows : 2 * rows]))

        def work(projected: list = projected, shape: Rows = shape, slots: tuple = slots) -> Tensor:
            return kernels.gated_delta_layer(*projected, layer, K_HEADS, shape, Slots(data, *slots))

        run.figure(
            f"gated-delta layer without projections and convolution, decode, {rows} rows", graph_us=graph(work),
            floor_us=2 * rows * data[0].nbytes / run.rate,
        )  # fmt: skip


def attention_decode(run: Run) -> None:
    """New tokens over pages in random order; 16 query and 4 key heads of 256."""
    page, kv_heads, heads, width = 32, 4, 16, 256
    for rows, keys, tokens in (
        (16, 32768, 1),
        (16, 32768, 5),
        (16, 32768, 8),
        (16, 2048, 1),
        (1, 4096, 1),
        (1, 32768, 1),
    ):
        count = rows * keys // page
        k, v = (torch.randn(count, page, kv_heads, width, device=DEVICE, dtype=LOW) for _ in range(2))
        table = torch.randperm(count, device=DEVICE, dtype=torch.int32)
        nowhere = table.new_empty(0)
        q = torch.randn(rows * tokens, heads, width, device=DEVICE, dtype=LOW)
        shape = Rows((tokens,) * rows, (keys - tokens,) * rows)
        pages = Pages(k, v, table, tuple(range(0, count, count // rows)), nowhere, nowhere)

        def work(q: Tensor = q, shape: Rows = shape, pages: Pages = pages) -> Tensor:
            return kernels.attention(q, shape, scale=width**-0.5, stored=pages)

        own = table[: count // rows]  # of the first row
        first = Pages(
            *(each.index_select(0, own).double() for each in (k, v)), torch.arange(len(own), device=DEVICE), (0,),
            nowhere, nowhere,
        )  # fmt: skip
        exact = ops.attention(q[:tokens].double(), Rows((tokens,), (keys - tokens,)), scale=width**-0.5, stored=first)
        took, floor = graph(work), (k.nbytes + v.nbytes) / run.rate
        run.figure(
            f"attention decode, {rows} rows of {tokens} over {keys}", graph_us=took, floor_us=floor,
            of_copy_rate=floor / took, error=error(work()[:tokens], exact),
        )  # fmt: skip


def delta_prefill(run: Run) -> None:
    """One long row, also with 16 cuts; and eight shorter ones."""
    peer = run.peer("chunk_gated_delta_rule")
    data = delta_states(20)
    for k_heads in (K_HEADS, HEADS):
        for rows, tokens in ((1, 2048), (1, 8192), (1, 32768), (8, 4096)):
            inputs, shape = delta_inputs(rows * tokens, k_heads), Rows((tokens,) * rows, (1,) * rows)
            read, write = tuple(range(rows)), tuple(range(rows, 2 * rows))
            work = lambda: kernels.gated_delta(*inputs, shape, stored=Slots(data, read, write))  # noqa: B023, E731
            values: dict[str, float] = {"eager_us": eager(work), "graph_us": graph(work)}
            values["floor_us"] = (sum(each.nbytes for each in inputs) + inputs[2].nbytes) / run.rate
            if rows == 1:
                cuts, slots = tuple(range(tokens // 17, tokens, tokens // 17))[:16], tuple(range(2, 18))
                cut_shape = Rows((tokens,), (1,), (cuts,))
                cut = lambda: kernels.gated_delta(*inputs, cut_shape, stored=Slots(data, (0,), (1,), (slots,)))  # noqa: B023, E731
                values["cuts_16_graph_us"] = graph(cut)
            if peer is not None:
                q, k, v, g, beta = (each.view(rows, tokens, *each.shape[1:]) for each in inputs)
                q, k = (each.repeat_interleave(HEADS // k_heads, 2) for each in (q, k))
                states = data[:rows].contiguous()
                theirs = lambda: peer(  # noqa: E731
                    q, k, v, g, beta, initial_state=states, output_final_state=True,  # noqa: B023
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                values["fla_eager_us"], values["fla_graph_us"] = eager(theirs), graph(theirs)
            if tokens == 2048:
                exact, last = exact_delta(*inputs, data[0])
                ours = work().out
                reference = Slots(data.cpu(), read, write)  # the readable op runs on the host
                out = ops.gated_delta(*(each.cpu() for each in inputs), shape, stored=reference).out.to(DEVICE)
                values |= {"error": error(ours, exact), "state_error": error(data[1], last)}
                values |= {
                    "reference_error": error(out, exact),
                    "reference_state_error": error(reference.data[1].to(DEVICE), last),
                }
                if peer is not None:
                    values["fla_error"] = error(theirs()[0][0], exact)
            run.figure(f"gated-delta prefill, {rows} rows of {tokens}, {k_heads} k heads", **values)


KERNELS = {"delta_decode": delta_decode, "attention_decode": attention_decode, "delta_prefill": delta_prefill}
GROUPS = {**KERNELS, **gpu_model.GROUPS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", help=f"some of {', '.join(GROUPS)}; default: those of kernels")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--tiny", action="store_true", help="whole models at a tiny shape on a CPU; only printed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.jsonl")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    run = Run(None, given.peers, "cpu") if given.tiny else Run(given.out, given.peers)
    usual = gpu_model.GROUPS if given.tiny else KERNELS
    for name in given.groups.split(",") if given.groups else usual:
        GROUPS[name](run)


if __name__ == "__main__":
    main()
