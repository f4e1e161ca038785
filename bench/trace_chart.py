"""Hit rates over budgets as one small SVG: a panel for each trace and geometry, a line for each policy."""

import math
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 150, 40, 40, 62
COLOURS = {"optimum": "#9aa0a6", "value": "#1a7f37", "lru": "#b35900", "pages": "#7d4cdb"}


def chart(lines: list[dict]) -> str:
    traces = list(dict.fromkeys(line["trace"] for line in lines))
    points = list(dict.fromkeys(line["point_tokens"] for line in lines))
    width, height = LEFT + len(points) * (WIDTH + GAP), TOP + len(traces) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for at, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 90 * at}" y="8" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18 + 90 * at}" y="14">{name}</text>')
    for row, trace in enumerate(traces):
        for column, point in enumerate(points):
            mine = [line for line in lines if line["trace"] == trace and line["point_tokens"] == point]
            parts.append(f'<g transform="translate({LEFT + column * (WIDTH + GAP)} {TOP + row * (HEIGHT + GAP)})">')
            parts += _panel(mine, f"{trace}, " + (f"point = {point} tokens" if point else "attention only"))
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(lines: list[dict], title: str) -> list[str]:
    if not lines:
        return []
    budgets = sorted({line["budget_share"] for line in lines})
    low, high = math.log(max(budgets[0], 1e-6)), math.log(max(budgets[-1], 1e-6))
    most = max(0.05, math.ceil(20 * max(line["hit_rate"] for line in lines)) / 20)

    def x(share: float) -> float:
        return WIDTH * (math.log(max(share, 1e-6)) - low) / (high - low) if high > low else WIDTH / 2

    def y(rate: float) -> float:
        return HEIGHT * (1 - rate / most)

    parts = [f'<text x="0" y="-8" font-weight="bold">{escape(title)}</text>']
    for step in range(6):
        rate = most * step / 5
        parts.append(f'<path d="M0 {y(rate):.1f}H{WIDTH}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="-5" y="{y(rate) + 3:.1f}" text-anchor="end">{rate:.2f}</text>')
    for share in budgets:
        parts.append(f'<text x="{x(share):.1f}" y="{HEIGHT + 14}" text-anchor="middle">{100 * share:.3g}%</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 28}" text-anchor="middle">memory, of all unique tokens</text>')
    for name, colour in COLOURS.items():
        spots = sorted((line["budget_share"], line["hit_rate"]) for line in lines if line["policy"] == name)
        if spots:
            path = "L".join(f"{x(share):.1f} {y(rate):.1f}" for share, rate in spots)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            parts += [f'<circle cx="{x(s):.1f}" cy="{y(r):.1f}" r="2.2" fill="{colour}"/>' for s, r in spots]
    return parts
