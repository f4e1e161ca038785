"""Draws loss curves as SVG: `python -m training.curve OUT.svg NAME=log.jsonl ...`. No plotting library is needed."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 760, 420, 56
COLOURS = ("#1b6e53", "#c2562b", "#3b5fa0", "#8a5a9e")
Points = list[tuple[float, float]]


def points(log: Path, field: str) -> Points:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], line[field]) for line in lines if "step" in line and field in line]


def panel(curves: dict[str, Points], title: str, left: int, top_share: float = 0.35) -> list[str]:
    """One picture: the best values get most of the height, for a loss starts far above where it is interesting."""
    values = sorted(y for curve in curves.values() for _, y in curve)
    low, high = values[0], values[0] + (values[-1] - values[0]) * top_share
    last = max(x for curve in curves.values() for x, _ in curve)
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(x: float, y: float) -> str:
        return f"{left + MARGIN + width * x / last:.1f},{MARGIN + height * (high - min(y, high)) / (high - low):.1f}"

    parts = [f'<text x="{left + WIDTH / 2}" y="30" text-anchor="middle" font-weight="bold">{title}</text>']
    for tick in range(6):
        y, at = low + (high - low) * tick / 5, MARGIN + height * (5 - tick) / 5
        x = last * tick / 5
        right = left + MARGIN + width
        parts.append(f'<path d="M{left + MARGIN} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left + MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{y:.2f}</text>')
        across = left + MARGIN + width * tick / 5
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{x:.0f}</text>')
    for (name, curve), colour, row in zip(curves.items(), COLOURS, range(4), strict=False):
        path = " ".join(place(x, y) for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        words = f"{name}: {curve[-1][1]:.3f}"
        right = left + WIDTH - MARGIN
        parts.append(f'<text x="{right}" y="{MARGIN + 18 + 18 * row}" text-anchor="end" fill="{colour}">{words}</text>')
    return parts


def main() -> None:
    out, *named = sys.argv[1:]
    logs = {name: Path(path) for name, path in (pair.split("=", 1) for pair in named)}
    parts = panel({name: points(log, "loss") for name, log in logs.items()}, "Training loss (nats per token)", 0)
    scores = {name: points(log, "bits_per_byte") for name, log in logs.items()}
    parts += panel(scores, "Validation (bits per byte)", WIDTH, top_share=1.0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
    style = 'font-family="sans-serif" font-size="13" fill="#333"><rect width="100%" height="100%" fill="white"/>'
    Path(out).write_text("\n".join([head + style, *parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
