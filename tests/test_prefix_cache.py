"""What the prefix cache promises: warm equals cold on every family, and each hit is as long as it can be."""

import threading
from random import Random

import pytest
from timeline import END, FAMILIES, Timeline, Watched, agrees, audit, empty, engine, expected, params, room

from bough import SamplingParams
from bough.cache.tree import Tier

EVERY = list(FAMILIES)
POINTS = [family for family in EVERY if family not in ("llama", "qwen3")]  # those that cannot resume anywhere
WINDOWS = {"mistral": 7, "gemma3": 6, "gemma4": 6}
SLOTS = ["lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.fixture(params=EVERY)
def family(request):
    return request.param


@pytest.fixture
def watched(family):
    with engine(family) as opened:
        yield Watched(opened)
        audit(opened)
        empty(opened)


def some(count: int, seed: int = 0) -> list[int]:
    dice = Random(seed)
    return [dice.choice([t for t in range(60) if t != END]) for _ in range(count)]


def ask(family: str, watched: Watched, prompt: list[int], tokens: int = 3, **options) -> int:
    """How many tokens of a prompt did not have to be computed. The answer must be right."""
    asked = params(tokens, **options)
    (out,) = watched.ask([(prompt, asked)])
    assert agrees(family, prompt, asked, out)
    assert out.usage.cached_tokens <= out.usage.matched_tokens <= out.usage.prompt_tokens == len(prompt)
    return out.usage.cached_tokens


# Warm equals cold.


def run(family: str, folder, seeds: range, steps: int) -> None:
    for seed in seeds:
        timeline = Timeline(family, seed, folder / str(seed))
        for _ in range(steps):
            timeline.step()
        timeline.restart()
        empty(timeline.engine)
        timeline.end()
        assert timeline.ties <= 1 + timeline.requests // 50


def test_timeline(family, tmp_path):
    run(family, tmp_path, range(2), steps=20)


@pytest.mark.long
def test_long_timeline(family, tmp_path):
    run(family, tmp_path, range(100, 160), steps=160)


def test_tight_timeline(family, tmp_path):
    """Memory for hardly more than one request, a little on the host and on disk: every tier and every move is used."""
    tight = {"page_tokens": 4, "running": 3, "step": 16, "policy": "value", "disk_write_rate": 1 << 40}
    more = 2.5 if family in SLOTS else 1.3  # slots for all that may run are not the cache's
    tight["device_bytes"] = int(more * room(family, 72, page_tokens=4, running=3, step=16))
    tight["host_bytes"] = room(family, 40, page_tokens=4, running=2)
    timeline = Timeline(family, 5, tmp_path, options={**tight, "disk_path": tmp_path, "disk_bytes": 60_000})
    for _ in range(40):
        timeline.step()
    timeline.restart()
    empty(timeline.engine)
    timeline.end()
    assert timeline.ties <= 2
    assert timeline.requests > 50 and timeline.cached and timeline.cancelled and timeline.restarts > 1
    moves = [f"leafs_evicted_from_{tier}" for tier in ("device", "host", "disk")]
    moves += ["nodes_demoted_to_host", "nodes_promoted_from_host", "nodes_written_to_disk", "nodes_promoted_from_disk"]
    moves += ["points_evicted_from_device"] if family in POINTS else []
    assert not [move for move in moves if not timeline.counters.get(move)], timeline.counters


# How long hits are.


@pytest.mark.parametrize("length", [2, 4, 5, 33])
def test_a_repeated_prompt_resumes_before_its_last_token(family, watched, length):
    prompt = some(length)
    assert ask(family, watched, prompt) == 0
    assert ask(family, watched, prompt) == length - 1
    assert ask(family, watched, prompt, seed=3) == length - 1, "another reply to it"


def test_one_token_is_always_computed(family, watched):
    for _ in range(3):
        assert ask(family, watched, [5]) == 0
    assert ask(family, watched, [5, 6]) <= 1
    assert ask(family, watched, [5, 8]) == 1


@pytest.mark.parametrize("at", [1, 8, 13, 29])
def test_where_a_request_left_a_path_the_next_one_resumes(family, watched, at):
    """At page borders and inside pages alike."""
    prompt = some(30)
    ask(family, watched, prompt)
    first = ask(family, watched, [*prompt[:at], 61, *some(5, seed=1)])
    assert first == at if family not in POINTS else first <= at
    assert ask(family, watched, [*prompt[:at], 62, *some(9, seed=2)]) == at


def test_a_turn_resumes_at_the_end_of_the_last_reply(family, watched):
    text = some(11)
    for turn in range(4):
        asked = params(5)
        (out,) = watched.ask([(text, asked)])
        assert agrees(family, text, asked, out)
        end = len(text) + len(out.tokens) - 1  # the last token was chosen, and never read
        text = [*text, *out.tokens, *some(6, seed=turn)]
        assert ask(family, watched, text, tokens=0) == end


def test_a_history_without_its_thinking(family, watched):
    prompt = some(19)
    reply = list(expected(family, tuple(prompt), params(6)).tokens)
    ask(family, watched, prompt, tokens=6)
    assert ask(family, watched, [*prompt, 60, *reply[3:], *some(4, seed=1)]) >= 18
    assert ask(family, watched, [*prompt, 59, *reply[4:], *some(7, seed=2)]) == 19


def test_boundaries_can_be_resumed_at(family, watched):
    prompt = some(60)
    watched.engine.submit(prompt, params(0), boundaries=[17, 40]).result()
    for at in (17, 40):
        assert ask(family, watched, [*prompt[:at], 61, 62]) == at


@pytest.mark.parametrize("window", WINDOWS.items(), ids=WINDOWS)
def test_inside_a_window_any_length_is_a_hit(window):
    family, tokens = window
    with engine(family) as opened:
        watched, prompt = Watched(opened), some(tokens)
        ask(family, watched, prompt)
        for at in range(1, tokens):
            assert ask(family, watched, [*prompt[:at], 61]) == at


@pytest.mark.parametrize("steps", [1, 3])
def test_a_cancelled_prefill_goes_on_where_it_stopped(family, steps):
    with engine(family, step=9) as opened:
        watched, prompt = Watched(opened), some(60)
        (out,) = watched.ask([(prompt, params())], [steps])
        assert (out.finish_reason, out.tokens) == ("cancelled", [])
        assert watched.fed == 9 * steps
        assert ask(family, watched, prompt) == 9 * steps
        audit(opened)


def test_a_cancelled_reply_is_kept(family, watched):
    prompt, asked = some(14), params(40, ignore_eos=True)
    (out,) = watched.ask([(prompt, asked)], [6])
    assert out.finish_reason == "cancelled" and agrees(family, prompt, asked, out)
    assert ask(family, watched, prompt) == 13
    assert ask(family, watched, [*prompt, *out.tokens, *some(3)]) == 14 + len(out.tokens) - 1


@pytest.mark.parametrize("step", [512, 13])
def test_what_comes_together_is_computed_once(family, step):
    with engine(family, step=step) as opened:
        watched, prompt = Watched(opened), some(50)
        outs = watched.ask([(prompt, params(1)) for _ in range(4)])
        assert watched.fed == 50 + 3
        assert [out.usage.cached_tokens for out in outs] == [0, 49, 49, 49]
        opened.cache.clear()
        watched.fed = 0
        overlapping = [(prompt[:at] + some(8, seed=at), params(1)) for at in (42, 42, 37)]
        outs = watched.ask(overlapping)
        for (text, asked), out in zip(overlapping, outs, strict=True):
            assert agrees(family, text, asked, out)
        assert watched.fed == 50 + 1 + 8
        audit(opened)


def test_a_prefix_is_shared_while_its_first_owner_still_writes(family, watched):
    prompt, later = some(23), []
    forward = watched.engine._runner.forward

    def submit_in_between(*args, **options):
        if watched.steps == 5:
            later.append(watched.engine.submit(prompt, params(2, seed=4)))
        return forward(*args, **options)

    watched.engine._runner.forward = submit_in_between
    (out,) = watched.ask([(prompt, params(30, ignore_eos=True))])
    assert agrees(family, prompt, params(30, ignore_eos=True), out)
    watched.engine._runner.forward = forward
    (handle,) = later
    assert agrees(family, prompt, params(2, seed=4), handle.result())
    assert handle.result().usage.cached_tokens == 22
    assert watched.steps <= 31, "it was served beside the first"


def test_salts_share_nothing(family, watched):
    prompt = some(21)
    for expect in (0, 20):
        for salt in (None, "", "a", "b"):
            assert ask(family, watched, prompt, salt=salt) == expect
    outs = watched.ask([(some(40, seed=9), params(1, salt=salt)) for salt in ("a", "b", None)])
    assert [out.usage.cached_tokens for out in outs] == [0, 0, 0]


@pytest.mark.parametrize("family", SLOTS)
def test_pages_of_tokens_that_are_read_again_are_not_written_again(family):
    with engine(family) as opened:
        watched, prompt = Watched(opened), some(40)
        ask(family, watched, prompt)
        pool = opened._runner.pool
        (unit,) = (i for i in pool.page_stores if pool.stores[i].unit.reach is None)

        def pages():
            walk = opened._loop.cache.tree.match(next(iter(opened._loop.cache.tree.roots)), prompt[:22])
            runs = [node.copies[Tier.DEVICE].runs[unit] for node in walk.nodes]
            ids = {run.first + i: int(page) for run in runs for i, page in enumerate(run.ids)}
            return [ids[number] for number in range(5)], pool.stores[unit].data[[ids[n] for n in range(5)]].clone()

        ids, data = opened.call(pages)
        out = opened.generate([*prompt[:22], 61, *some(6, seed=1)], params(2))
        assert (out.usage.matched_tokens, out.usage.cached_tokens) == (22, 0)
        again, same = opened.call(pages)
        assert again == ids and bool((same == data).all())


@pytest.mark.parametrize(
    "options", [{"page_tokens": 1}, {"page_tokens": 64}, {"running": 1}, {"policy": "lru"}], ids=str
)
def test_odd_sizes(family, options):
    with engine(family, **options) as opened:
        watched, prompt = Watched(opened), some(37)
        ask(family, watched, prompt)
        assert ask(family, watched, prompt) == 36
        ask(family, watched, [*prompt[:21], 61])
        assert ask(family, watched, [*prompt[:21], 62]) == 21
        outs = watched.ask([([*prompt[:30], seed], params(2)) for seed in range(8, 14)])
        assert all(out.finish_reason in ("length", "stop") for out in outs)
        empty(opened)


def test_requests_that_had_to_give_their_memory_back_resume(family):
    """Four run where two have room; what one gives up is cached, as far as it is not needed."""
    least = room(family, 90, page_tokens=4, running=4, step=16)
    with engine(family, running=4, step=16, device_bytes=int(1.6 * least)) as opened:
        watched = Watched(opened)
        requests = [(some(40, seed=seed), params(30, seed=seed, ignore_eos=True)) for seed in range(6)]
        for (prompt, asked), out in zip(requests, watched.ask(requests), strict=True):
            assert agrees(family, prompt, asked, out)
        audit(opened)
        empty(opened)


def test_without_a_cache_nothing_is_kept(family):
    with engine(family, enabled=False) as opened:
        watched, prompt = Watched(opened), some(20)
        assert [ask(family, watched, prompt) for _ in range(2)] == [0, 0]
        assert opened.cache.describe() == [] and opened.cache.explain(prompt).matched == 0
        opened.cache.clear()
        opened.cache.flush()


def test_many_threads(family, watched):
    """Clients that come and go as they like."""
    faults: list[BaseException] = []

    def client(seed: int) -> None:
        dice = Random(seed)
        try:
            for _ in range(6):
                prompt, asked = some(12 + dice.randrange(3) * 10), params(3, seed=dice.choice([None, 1]))
                handle = watched.engine.submit(prompt, asked)
                if dice.random() < 0.3:
                    handle.cancel()
                assert agrees(family, prompt, asked, handle.result())
        except BaseException as fault:  # noqa: BLE001 (the test raises it)
            faults.append(fault)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# What it says about itself.


def reasons(opened, prompt, **options) -> dict[str, tuple[int, int]]:
    before = opened.cache.describe()
    counters = opened.cache.stats()
    told = opened.cache.explain(prompt, **options)
    assert opened.cache.explain(prompt, **options) == told, "asking twice gives another answer"
    assert opened.cache.describe() == before and opened.cache.stats() == counters, "asking changes something"
    assert told.tokens == len(prompt) and told.resumable <= told.matched
    covered = told.resumable
    for loss in told.losses:
        assert loss.start == covered < loss.end and loss.detail
        covered = loss.end
    assert covered == len(prompt)
    assert len(told.lines()) == 1 + len(told.held) + len(told.losses)
    return {loss.reason: (loss.start, loss.end) for loss in told.losses}


def test_why(family, watched):
    opened, prompt = watched.engine, some(30)
    assert reasons(opened, prompt) == {"never seen": (0, 29), "last token": (29, 30)}
    assert reasons(opened, [5]) == {"too short": (0, 1)}
    ask(family, watched, prompt)
    assert reasons(opened, prompt) == {"last token": (29, 30)}
    assert reasons(opened, prompt, cache_salt="a") == {"salted": (0, 29), "last token": (29, 30)}
    longer = [*prompt[:20], *some(10, seed=1)]
    told = reasons(opened, longer)
    if family in POINTS:
        assert told == {"no resume point": (0, 20), "never seen": (20, 29), "last token": (29, 30)}
    else:
        assert told == {"never seen": (20, 29), "last token": (29, 30)}
    ask(family, watched, longer)
    ask(family, watched, longer)
    stats = opened.cache.stats()
    assert (stats["requests"], stats["prompt_tokens"], stats["cached_tokens"]) == (
        3,
        90,
        29 + (20, 0)[family in POINTS],
    )
    assert stats["matched_tokens_without_resume_point"] == (20 if family in POINTS else 0)
    opened.cache.clear()
    assert list(reasons(opened, prompt)) == ["evicted", "last token"]


def test_every_mark_becomes_a_resume_point(family, watched):
    """However many a client asks for, and however short the prompt is."""
    prompt, marks = some(50), (7, 16, 29, 41)
    watched.engine.submit(prompt, SamplingParams(max_tokens=2, temperature=0), marks=marks).result()
    for at in (*marks, 49):
        assert watched.engine.cache.explain([*prompt[:at], *some(9, seed=1)]).resumable == at


def test_why_evicted_where_what_was_known_went_on_otherwise(family, watched):
    """What was evicted is told from what never was, at the token."""
    prompt, other = some(30), some(12, seed=1)
    ask(family, watched, prompt)
    watched.engine.cache.clear()
    told = reasons(watched.engine, [*prompt[:17], *other])
    assert told == {"evicted": (0, 17), "never seen": (17, 28), "last token": (28, 29)}
    assert reasons(watched.engine, prompt[:9]) == {"evicted": (0, 8), "last token": (8, 9)}
    assert reasons(watched.engine, other) == {"never seen": (0, 11), "last token": (11, 12)}


def test_why_evicted(family):
    with engine(family, running=1, device_bytes=2 * room(family, 60, page_tokens=4, running=1)) as opened:
        watched, prompt = Watched(opened), some(40)
        ask(family, watched, prompt)
        for seed in range(9):
            ask(family, watched, some(50, seed=seed + 1))
        told = opened.cache.explain(prompt)
        assert {loss.reason for loss in told.losses} <= {"evicted", "no resume point", "last token"}
        assert any("left device" in loss.detail for loss in told.losses)


@pytest.mark.parametrize("family", POINTS)
def test_why_a_resume_point_is_gone(family):
    """A point inside a path goes before the path does."""
    with engine(family) as opened:
        watched, prompt = Watched(opened), some(40)
        ask(family, watched, prompt)
        ask(family, watched, [*prompt[:20], 61])

        def drop():
            found = opened._loop.cache
            (node,) = (node for node in found.tree.walk() if node.end == 20)
            found.tiers.drop_point(node, Tier.DEVICE)

        opened.call(drop)
        told = opened.cache.explain([*prompt[:20], 62])
        (loss,) = (loss for loss in told.losses if loss.reason == "no resume point")
        assert (loss.start, loss.end) == (0, 20) and "the one at 20 left device" in loss.detail
        assert ask(family, watched, [*prompt[:20], 62]) == 0
        assert ask(family, watched, [*prompt[:20], 63]) == 20
