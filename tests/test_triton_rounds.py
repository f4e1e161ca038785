"""Rounds that the device counts itself: its kernels against the readable ops, and models that go on so."""

from random import Random

import pytest
import torch
from test_fixed import Pair, lfm2, pair_of, qwen3_5  # noqa: F401 (a fixture)
from test_triton import DEVICE, HERE, kernels, plain_numbers  # noqa: F401 (a fixture)

from bough.ops import rounds
from bough.ops.ragged import STRETCH
from bough.ops.rounds import RoundNumbers
from bough.state.transaction import commit

if HERE:
    from bough.ops import triton as twin

PAGE = 5


@kernels
@pytest.mark.parametrize("seed", range(3))
def test_how_many_stand(seed):
    draw = Random(seed)
    counts = [draw.randint(1, 9) for _ in range(7)]
    starts = [sum(counts[:row]) for row in range(7)]
    fed, chosen = (torch.tensor([int(draw.random() < 0.9) for _ in range(sum(counts))]) for _ in range(2))
    expected = []
    for start, count in zip(starts, counts, strict=True):
        kept = 1
        while kept < count and chosen[start + kept - 1] == fed[start + kept]:
            kept += 1
        expected.append(kept)
    places = [torch.tensor(each, dtype=torch.int32) for each in (starts, counts)]
    assert rounds.standing(chosen, fed, *places).tolist() == expected
    on_device = (each.to(DEVICE) for each in (chosen, fed, *places))
    assert twin.standing(*on_device).tolist() == expected
    assert len(set(expected)) > 2


def numbers(draw: Random, rows: int, padded: int) -> tuple[RoundNumbers, torch.Tensor, torch.Tensor]:
    """Of rows of which some are not there; and what was kept of them and chosen."""
    counts = [draw.randint(1, 9) for _ in range(rows)]
    total, at = sum(counts), [STRETCH * row + draw.choice([0, 16]) for row in range(rows)]
    kept = [draw.randint(1, count) for count in counts]
    owed = [draw.randint(0, 16 - count) for count in counts]
    history = [draw.randint(1, 60) for _ in range(rows)]
    offset = [20 * row for row in range(rows)]

    def ints(values, size, blank):
        return torch.tensor([*values, *[blank] * (size - len(values))], dtype=torch.int32, device=DEVICE)

    by_row = [[sum(counts[:row]) for row in range(rows)], counts, history, [3 + row for row in range(rows)], at]
    empty = [ints([], padded, -7) for _ in range(3)]
    made = RoundNumbers(
        *(ints(each, padded, 0) for each in by_row),
        record=empty[0],
        owed=(ints(owed, padded, 0), ints(owed, padded, 0)),
        keep=(empty[1], empty[2]),
        offset=ints(offset, padded, 0),
        token=ints(range(1000, 1000 + total), total + 6, -7),
        position=ints([], total + 6, -7),
        place=ints([], total + 6, -7),
        page=ints([], total + 6, -7),
        pages=ints(draw.sample(range(5000), 20 * rows), 20 * rows, 0),
    )
    return made, ints(kept, rows, 0), torch.randint(100, (total,), device=DEVICE)


@kernels
@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_the_next_round(seed):
    made, kept, chosen = numbers(Random(seed), 6, 8)
    ours = RoundNumbers(*(tuple(map(torch.clone, each)) if isinstance(each, tuple) else each.clone() for each in made))
    theirs = RoundNumbers(*(tuple(map(_on_host, each)) if isinstance(each, tuple) else _on_host(each) for each in made))
    twin.go_on(ours, kept, chosen, PAGE)
    rounds.go_on(theirs, kept.cpu(), chosen.cpu(), PAGE)
    for name, one, other in zip(RoundNumbers._fields, ours, theirs, strict=True):
        for mine, expected in zip(*((each,) if torch.is_tensor(each) else each for each in (one, other)), strict=True):
            assert mine.tolist() == expected.tolist(), name
    assert -7 not in theirs.record[:6].tolist() and (theirs.keep[0][6:] == -7).all()


def _on_host(each: torch.Tensor) -> torch.Tensor:
    return each.cpu().clone()


@kernels
@pytest.mark.parametrize("family", [qwen3_5, lfm2])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rounds_that_begin_before_others_are_read_equal_readable_ones(family, rows, pair_of):  # noqa: F811
    draw, pair = Random(rows), pair_of(family)
    for row in range(rows):
        pair.start([draw.randrange(61) for _ in range(2 + 3 * row)])
    count = 4 if rows > 1 else 5
    tokens = some(draw, rows, count)
    plain, fast = ([pair.states[row][side].begin() for row in range(rows)] for side in range(2))
    pair.step(tokens)
    for _ in range(7):
        kept = [draw.randint(1, count) for _ in range(rows)]
        tokens = some(draw, rows, count)
        logits = begun(pair, kept, tokens)
        commit(list(zip(plain, kept, strict=True)))
        plain = [pair.states[row][0].begin() for row in range(rows)]
        batch = [(pair.states[row][0], each) for row, each in enumerate(tokens)]
        _, expected = pair.plain.forward(batch, [count] * rows)
        torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=2e-4)
        fast = pair.fast.graphs.land(kept)
        pair.fast.pool.check()
    for opened in (plain, fast):
        commit([(each, row % count) for row, each in enumerate(opened)])
    pair.step(some(draw, rows, 1))
    pair.step(some(draw, rows, 12))  # no captured step


def some(draw: Random, rows: int, count: int) -> list[list[int]]:
    return [[draw.randrange(61) for _ in range(count)] for _ in range(rows)]


def begun(pair: Pair, kept: list[int], tokens: list[list[int]]) -> torch.Tensor:
    """Feed the fast ones these, of which the first is told by the device."""
    count, flat = len(tokens[0]), [token for each in tokens for token in (0, *each[1:])]
    chosen = torch.zeros(len(flat), dtype=torch.int64)
    for row, (stands, each) in enumerate(zip(kept, tokens, strict=True)):
        chosen[row * count + stands - 1] = each[0]
    done = pair.fast.graphs.go_on(torch.tensor(kept, dtype=torch.int32).to(DEVICE), chosen.to(DEVICE), flat)
    assert done is not None
    return done[1].clone()
