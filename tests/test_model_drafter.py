"""A model as a drafter: its drafts are its own continuation, and drafting leaves no trace on any kind of layer."""

from contextlib import suppress
from functools import cache
from random import Random

import pytest
import torch
import transformers
from parity import TIE, TOLERANCE, feed, pool_for, random_tokens, randomise, save
from test_mechanism_families import FAMILIES, SMALL
from torch import Tensor

from bough.config import SamplingParams
from bough.draft import Drafter, Grown, Wanted
from bough.draft.model import ModelDrafter
from bough.engine.sampler import RowSampling, TokenCounts, draw
from bough.errors import PoolFull
from bough.models.load import load_model
from bough.models.model import Model
from bough.state.kinds import SlotKind
from bough.state.live import State
from bough.state.pool import Pool

USED = ["llama", "mistral", "gemma3", "gemma4", "lfm2", "qwen3_5"]  # full, windows alone and among others, slots
CONTEXT = 128


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A tiny random model of a family, the same each time."""

    @cache
    def loaded(family: str, vocab_size: int = 64) -> Model:
        kind, options = FAMILIES[family]
        options = {**SMALL, **options, "vocab_size": vocab_size, "max_position_embeddings": CONTEXT}
        torch.manual_seed(0)
        reference = transformers.AutoModelForCausalLM.from_config(kind(**options))
        randomise(reference, spread=0.2)
        return load_model(save(reference, tmp_path_factory.mktemp(family)), dtype="float32")

    return loaded


@pytest.fixture(params=USED)
def model(request, load) -> Model:
    return load(request.param)


def greedy(logits: Tensor, rows, depth: int) -> Tensor:
    return logits.argmax(-1)


class Noise:
    """Draws as requests of these parameters would, each with a seed and an index of its own."""

    def __init__(self, params: SamplingParams, index: int = 0) -> None:
        self.params, self.index = params, index

    def __call__(self, logits: Tensor, rows, depth: int) -> Tensor:
        assert len(logits) == len(rows)
        return draw(logits, [RowSampling(self.params, 11 + row, self.index + depth) for row in rows])[0]


class Watched:
    """A model that says how large its steps were, and fails when told to."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.steps: list[int] = []
        self.fails_at: int | None = None  # which of the coming steps

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, step) -> Tensor:
        self.steps.append(step.rows.total)
        hidden = self._model(step)
        if self.fails_at is not None and len(self.steps) > self.fails_at:
            raise InterruptedError
        return hidden


@torch.inference_mode()
def from_nothing(model: Model, tokens: list[int]) -> tuple[State, Tensor]:
    """The state after these tokens, and the logits of all of them, in a pool of their own."""
    pool = pool_for(model)
    state = State(pool)
    return state, feed(model, pool, [(state, tokens)])[0]


def contents(model: Model, state: State) -> list[Tensor]:
    """Copies of all that the state holds, in token order."""
    held = []
    for layer, kind in enumerate(model.kinds):
        if kind is None or not state.length:
            continue
        if isinstance(kind, SlotKind):
            held += [state.pool.part(layer, part.name)[state.slot].clone() for part in kind.parts(model.dtype)]
        else:
            held += state.view(layer)
    return held


def expect_level(model: Model, state: State, tokens: list[int]) -> None:
    """The state is what a from-scratch run of its tokens leaves."""
    state.check()
    assert state.length == len(tokens)
    for ours, expected in zip(contents(model, state), contents(model, from_nothing(model, tokens)[0]), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= TOLERANCE


def expect_greedy(model: Model, tokens: list[int], draft: list[int]) -> None:
    """The draft is what the model itself says after the tokens, but for ties."""
    logits = from_nothing(model, [*tokens, *draft])[1][len(tokens) - 1 : -1]
    for row, token in zip(logits, draft, strict=True):
        assert row[token] >= row.max() - TIE


def held(pool: Pool) -> list[int]:
    return [store.used for store in pool.stores]


def expect_empty(pool: Pool) -> None:
    pool.check()
    assert not pool.states and all(store.used == 1 for store in pool.stores), "something leaked"


class Texts:
    """Texts with their drafter's states, told and asked as the engine does."""

    def __init__(self, drafter: ModelDrafter, pool: Pool, texts: list[list[int]]) -> None:
        self.drafter, self.pool, self.tokens = drafter, pool, dict(enumerate(texts))
        self.states = {number: State(pool) for number in self.tokens}

    def tell(self) -> None:
        self.drafter.committed(
            [Grown(n, "", self.tokens[n][state.length :], None, state) for n, state in self.states.items()]
        )

    def ask(self, most: list[int], choose=greedy) -> dict[int, list[int]]:
        """Drafts by text; every state is bit by bit as before, and no memory is kept."""
        model, before, used = self.drafter.model, self._contents(), held(self.pool)
        wanted = [Wanted(n, each, None, state) for (n, state), each in zip(self.states.items(), most, strict=True)]
        drafts = self.drafter.propose(wanted, choose)
        assert held(self.pool) == used and self._contents() == before
        self.pool.check()
        assert all(0 <= token < model.vocab_size for draft in drafts for token in draft)
        return {n: [int(token) for token in draft] for n, draft in zip(self.states, drafts, strict=True)}

    def _contents(self) -> list[tuple[int, str, list[bytes]]]:
        return [
            (state.length, state.condition, [each.numpy().tobytes() for each in contents(self.drafter.model, state)])
            for state in self.states.values()
        ]

    def release(self) -> None:
        for state in self.states.values():
            state.release()
        expect_empty(self.pool)


def three(length: int = 30) -> list[list[int]]:
    return [random_tokens(64, length - 9 * i, seed=i) for i in range(3)]


def test_drafts_are_its_own_greedy_continuation(model):
    """Rows of unequal lengths and depths, one of them not asked for; asking twice changes nothing."""
    texts = Texts(ModelDrafter(model, 64), pool_for(model), three())
    texts.tell()
    for most in ([5, 2, 7], [1, 0, 4], [1, 1, 1], [5, 2, 7]):
        drafts = texts.ask(most)
        assert [len(draft) for draft in drafts.values()] == most
        for number, draft in drafts.items():
            expect_greedy(model, texts.tokens[number], draft)
    for number, state in texts.states.items():
        expect_level(model, state, texts.tokens[number])
    texts.release()


def test_drafts_are_its_own_seeded_continuation(model):
    params = SamplingParams(temperature=0.9, top_p=0.95)
    texts = Texts(ModelDrafter(model, 64), pool_for(model), three())
    texts.tell()
    choose = Noise(params, index=4)
    for number, draft in texts.ask([4, 6, 3], choose).items():
        written = list(texts.tokens[number])
        for depth, token in enumerate(draft):
            logits = from_nothing(model, written)[1][-1:]
            assert token == int(choose(logits, [number], depth))
            written.append(token)
    texts.release()


def test_random_rounds(model):
    """Any number of draft tokens stands, texts come, fork and go, and a cache holds on to what they had."""
    dice, drafter, pool = Random(5), ModelDrafter(model, 64), pool_for(model)
    texts, kept = Texts(drafter, pool, three(20)), []
    for round in range(20):
        texts.tell()
        drafts = texts.ask([dice.randint(0, 6) for _ in texts.states])
        for number, draft in drafts.items():
            expect_greedy(model, texts.tokens[number], draft)
            expect_level(model, texts.states[number], texts.tokens[number])
            texts.tokens[number] += [*draft[: dice.randint(0, len(draft))], dice.randrange(64)]
        number = dice.choice(list(texts.states))
        match round % 5:
            case 0:  # as a cache does at the end of a prompt
                state = texts.states[number]
                kept.append((state.snapshot(0), texts.tokens[number][: state.length]))
            case 1:
                twin = max(texts.states) + 1
                texts.states[twin], texts.tokens[twin] = texts.states[number].fork(), list(texts.tokens[number])
            case 2 if len(texts.states) > 3 or len(texts.tokens[number]) > 60:
                texts.states.pop(number).release()
                drafter.close(number)
            case 3:  # another text begins like one of the past
                path, tokens = dice.choice(kept)
                again = max(texts.states) + 1
                texts.states[again], texts.tokens[again] = State(pool), [*tokens, *random_tokens(64, 3, seed=round)]
                if path.resumes:
                    texts.states[again].restore([path], path.end)
    for path, _ in kept:
        path.close()
    texts.release()


@torch.inference_mode()
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=20)], ids=["greedy", "noise"]
)
def test_a_draft_of_the_target_itself_is_accepted_in_full(model, params):
    """Rounds as the engine runs them: the target reads the last token and the draft in a transaction."""
    drafter, target = ModelDrafter(model, 64), pool_for(model)
    texts = Texts(drafter, pool_for(model), three(25))
    states = {number: State(target) for number in texts.tokens}
    feed(model, target, [(states[n], tokens[:-1]) for n, tokens in texts.tokens.items()])
    written, most = 0, [3, 5, 4]
    for _ in range(4):
        texts.tell()
        choose = Noise(params, written)
        drafts = texts.ask(most, choose)
        open_ones = {n: state.begin() for n, state in states.items()}
        out = feed(model, target, [(states[n], [texts.tokens[n][-1], *draft]) for n, draft in drafts.items()])
        for (number, draft), logits in zip(drafts.items(), out, strict=True):
            drawn = [int(choose(logits[j : j + 1], [number], j)) for j in range(len(logits))]
            assert drawn[:-1] == draft
            open_ones[number].commit(4)  # as many in all rows, so that they share an index
            texts.tokens[number] += drawn[:4]
        written += 4
        most = [3, 3, 3]
    texts.release()


def test_texts_it_lacks_get_no_draft(model):
    drafter, pool = ModelDrafter(model, 64), pool_for(model)
    texts = Texts(drafter, pool, three())
    assert texts.ask([3, 3, 3]) == {0: [], 1: [], 2: []}
    texts.tell()
    before = texts.ask([3, 3, 3])
    drafter.close(1)
    drafter.close(77)
    drafter.committed([Grown(n, "", [], None, state) for n, state in texts.states.items()])  # nothing new
    assert texts.ask([3, 3, 3]) == {**before, 1: []}
    texts.tokens[1].append(5)
    texts.tell()
    after = texts.ask([3, 3, 3])
    assert {**after, 1: []} == {**before, 1: []}
    expect_greedy(model, texts.tokens[1], after[1])
    texts.release()


def test_long_texts_are_fed_in_bounded_steps(model):
    """Whatever the pieces, the state and the drafts are those of the whole."""
    watched = Watched(model)
    texts = Texts(ModelDrafter(watched, 64, step_tokens=16), pool_for(model), [*three(45), [3]])
    texts.tell()
    assert watched.steps == [16] * 6 + [13]
    for number, draft in texts.ask([2, 3, 1, 2]).items():
        expect_level(model, texts.states[number], texts.tokens[number])
        expect_greedy(model, texts.tokens[number], draft)
    assert watched.steps[7:] == [3, 1]  # rows that want no more are left out
    texts.release()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_failing_in_a_draft_leaves_no_trace(model, depth):
    watched = Watched(model)
    texts = Texts(ModelDrafter(watched, 64), pool_for(model), three())
    texts.tell()

    def fails(logits: Tensor, rows, at: int) -> Tensor:
        if at == depth:
            raise RuntimeError
        return logits.argmax(-1)

    before, used = texts._contents(), held(texts.pool)
    with pytest.raises(RuntimeError):
        texts.ask([5, 2, 5], fails)
    watched.fails_at = len(watched.steps) + depth
    with pytest.raises(InterruptedError):
        texts.ask([5, 2, 5])
    texts.pool.check()
    assert (texts._contents(), held(texts.pool)) == (before, used)
    watched.fails_at = None
    for number, draft in texts.ask([5, 2, 5]).items():
        expect_greedy(model, texts.tokens[number], draft)
    texts.release()


def test_failing_while_reading_leaks_nothing(model):
    """A slot written in place is lost with its state, as in any forward; the rest can be told again."""
    watched = Watched(model)
    drafter = ModelDrafter(watched, 64, step_tokens=16)
    texts = Texts(drafter, pool_for(model), three())
    watched.fails_at = 2
    with pytest.raises(InterruptedError):
        texts.tell()
    texts.pool.check()
    watched.fails_at = None
    for number, state in texts.states.items():
        if state.condition == "broken":
            state.release()
            texts.states[number] = State(texts.pool)
    assert len(texts.ask([2, 2, 2])[0]) in (0, 2)
    texts.tell()
    for number, draft in texts.ask([3, 3, 3]).items():
        expect_level(model, texts.states[number], texts.tokens[number])
        expect_greedy(model, texts.tokens[number], draft)
    texts.release()


class Hog:
    """Holds all pages that the pool has left."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.taken = pool, []
        for unit in pool.page_stores:
            with suppress(PoolFull):
                while True:
                    self.taken.append((unit, pool.take([int(each == unit) for each in range(len(pool.stores))])[unit]))
        pool.register(self)

    def references(self):
        return self.taken

    def release(self) -> None:
        self.pool.release(self.taken)
        self.pool.unregister(self)


def test_a_full_pool_makes_drafts_shorter(model):
    """The first token needs no memory, and those that are left of a page are used."""
    texts = Texts(ModelDrafter(model, 64), pool_for(model, tokens=200, page_tokens=8), three())
    texts.tell()
    hog = Hog(texts.pool)
    drafts = texts.ask([30, 2, 30])
    assert [len(draft) for draft in drafts.values()] == [3, 2, 3]  # 30 tokens fill four pages but for two places
    for number, draft in drafts.items():
        expect_greedy(model, texts.tokens[number], draft)
    hog.release()
    assert [len(draft) for draft in texts.ask([30, 2, 30]).values()] == [30, 2, 30]
    texts.release()


def test_what_a_full_pool_could_not_read_is_told_again(model):
    texts = Texts(ModelDrafter(model, 64, step_tokens=16), pool_for(model, tokens=200), three())
    texts.tell()
    hog = Hog(texts.pool)
    for tokens in texts.tokens.values():
        tokens += random_tokens(64, 20, seed=9)
    with pytest.raises(PoolFull):
        texts.tell()
    texts.pool.check()
    assert texts.ask([2, 2, 2]) == {0: [], 1: [], 2: []}
    hog.release()
    texts.tell()
    for number, draft in texts.ask([2, 2, 2]).items():
        expect_level(model, texts.states[number], texts.tokens[number])
        expect_greedy(model, texts.tokens[number], draft)
    texts.release()


def test_without_room_for_forks_there_is_one_token(load):
    for family, expected in (("llama", 4), ("gemma3", 1), ("qwen3_5", 1)):
        model = load(family)
        texts = Texts(ModelDrafter(model, 64), pool_for(model, running=3), three())
        texts.tell()
        assert {len(draft) for draft in texts.ask([4, 4, 4]).values()} == {expected}
        texts.release()


def test_a_text_that_outgrows_the_model(model):
    texts = Texts(ModelDrafter(model, 64), pool_for(model), [random_tokens(64, CONTEXT - 2, seed=1), [1, 2]])
    texts.tell()
    drafts = texts.ask([8, 8])
    assert [len(draft) for draft in drafts.values()] == [3, 8]  # the last of three is not fed
    expect_greedy(model, texts.tokens[0], drafts[0])
    for grown in (2, 1, 30):
        texts.tokens[0] += random_tokens(64, grown, seed=grown)
        texts.tell()
        assert len(texts.ask([8, 8])[0]) == (1 if grown == 2 else 0)
        expect_level(model, texts.states[0], texts.tokens[0][:CONTEXT])
    texts.release()


@pytest.mark.parametrize("size", [60, 70])
def test_vocabularies_padded_to_other_sizes(load, size):
    """Penalties count the target's tokens; ids that only one side has are neither drawn nor in the way."""
    model, params = load("qwen3_5", size), SamplingParams(temperature=1.5, repetition_penalty=1.2)
    texts = Texts(ModelDrafter(model, 64), pool_for(model), [[*tokens, 63] for tokens in three()])
    texts.tell()
    shapes = set()

    def choose(logits: Tensor, rows, depth: int) -> Tensor:
        shapes.add(logits.shape[-1])
        counts = [TokenCounts(texts.tokens[row], 64, "cpu") for row in rows]
        return draw(logits, [RowSampling(params, row, depth, counts[i]) for i, row in enumerate(rows)])[0]

    drafts = texts.ask([20, 20, 20], choose)
    assert shapes == {64}
    assert all(0 <= token < min(size, 64) for draft in drafts.values() for token in draft)
    read = [[min(token, size - 1) for token in tokens] for tokens in texts.tokens.values()]
    expect_level(model, texts.states[0], read[0])
    beyond = texts.drafter.propose(  # even a target that insists on what the model cannot read
        [Wanted(0, 3, None, texts.states[0])], lambda logits, rows, depth: torch.tensor([63])
    )
    assert [draft.tolist() for draft in beyond] == [[63, 63, 63]]
    texts.release()


def test_is_a_drafter_with_the_kinds_of_its_model(model):
    drafter: Drafter = ModelDrafter(model, 64)
    assert (drafter.kinds, drafter.lag) == (model.kinds, 0)
