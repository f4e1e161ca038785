"""Replay recorded requests through the prefix cache's tree and policies, without a model, and compare hit rates.

    python bench/trace.py                                    # the traces beside the project, 1 to 20% of unique bytes
    python bench/trace.py requests.jsonl --budgets 0.05      # a trace of your own, one budget
    python bench/trace.py a.jsonl folder/ --tokens 0.9e6,1.9e6,4.7e6 --points 0 --policies lru,value
    python bench/trace.py folder/ --join agents              # all files of a folder as one trace of that name

Files are JSON lines in Mooncake's format (timestamp in ms, input_length, output_length, hash_ids of 512-token pieces)
or with raw text (timestamp in µs, input, output, session_id); bench/trace_files.py says how they become symbols.

For each trace, each budget (a share of the memory that all different prompt tokens would take, or tokens) and each
geometry (what a resume point weighs in tokens of K and V; 0: attention only) one JSON line with the share of prompt
tokens that need not have been computed, for
  lru      least recently used, resume points where a prompt ends and where it leaves a known path (as Marconi admits)
  value    the default policy, with the same points
  pages    least recently used, a resume point every 528 tokens and nowhere else, as large engines do
  optimum  knowing the future: Belady without points; with them a feasible oracle, which is no bound and can be outdone
and one chart (SVG). Progress goes to stderr.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

from trace_chart import chart
from trace_files import Malformed, Trace, read
from trace_optimum import Optimum
from trace_pages import Pages
from trace_replay import Replay

from bough.cache.policy import POLICIES

GRID = 528  # tokens between resume points on a page grid
SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
DEFAULT = {"conversation": SHARED / "mooncake" / "conversation_trace.jsonl", "miniswe": SHARED / "agents" / "miniswe"}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = parse()
    try:
        traces = load(options)
    except Malformed as error:
        sys.exit(f"cannot replay: {error}")
    for path in (options.out, options.chart):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists() and not options.append:
        options.out.unlink()
    lines: list[dict] = []
    for trace in traces:
        for line in compare(trace, options):
            lines.append(line)
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
    options.chart.write_text(chart(lines))
    print(f"{len(lines)} lines in {options.out}, chart in {options.chart}", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*POLICIES, "pages", "optimum"]
    parser.add_argument("traces", nargs="*", type=Path, help="files or folders of .jsonl; each is a trace")
    parser.add_argument("--join", metavar="NAME", help="all given files are one trace of this name")
    parser.add_argument("--budgets", type=floats, default=[0.01, 0.02, 0.05, 0.1, 0.2], help="shares of unique bytes")
    parser.add_argument("--tokens", type=floats, help="budgets in tokens instead")
    parser.add_argument("--points", type=floats, default=[0, 409, 3144], help="weights of a resume point, in tokens")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=names, help=", ".join(names))
    parser.add_argument("--limit", type=int, help="only the first so many requests of each trace")
    parser.add_argument("--append", action="store_true", help="keep the lines that are in the results file")
    parser.add_argument("--out", type=Path, default=RESULTS / "trace.jsonl")
    parser.add_argument("--chart", type=Path, default=RESULTS / "trace.svg")
    options = parser.parse_args()
    if unknown := set(options.policies) - set(names):
        parser.error(f"unknown policies: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def load(options: argparse.Namespace) -> list[Trace]:
    if not options.traces:
        chosen = {name: [path] for name, path in DEFAULT.items() if path.exists()}
        if not chosen:
            raise Malformed(f"no trace is given and none is in {SHARED}")
    elif options.join:
        chosen = {options.join: options.traces}
    else:
        chosen = {path.stem: [path] for path in options.traces}
    traces = [read(paths, name) for name, paths in chosen.items()]
    return [Trace(t.name, t.symbol_tokens, t.requests[: options.limit]) for t in traces]


def compare(trace: Trace, options: argparse.Namespace):
    """One line for each budget, geometry and policy."""
    unique = Optimum(trace, 0).unique_tokens
    print(
        f"{trace.name}: {len(trace.requests)} requests, {trace.prompt_tokens} tokens, {unique} unique", file=sys.stderr
    )
    budgets = [round(b) for b in options.tokens] if options.tokens else [round(b * unique) for b in options.budgets]
    for point in map(int, options.points):
        optimum = Optimum(trace, point) if "optimum" in options.policies else None
        for budget in budgets:
            for policy in options.policies:
                if policy == "pages" and not point:
                    continue  # without points a page grid changes nothing
                start = time.perf_counter()
                if policy == "optimum":
                    assert optimum is not None
                    rate = optimum.run(budget)
                elif policy == "pages":
                    rate = Pages(trace, budget=budget, point=point, every=GRID).run()
                else:
                    rate = Replay(trace, policy=policy, budget=budget, point=point).run()
                line = {
                    "bench": "trace", "trace": trace.name, "requests": len(trace.requests), "point_tokens": point,
                    "budget_tokens": budget, "budget_share": round(budget / unique, 4), "policy": policy,
                    "hit_rate": round(rate, 4), "seconds": round(time.perf_counter() - start, 1),
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                }  # fmt: skip
                print(json.dumps(line), file=sys.stderr)
                yield line


if __name__ == "__main__":
    main()
