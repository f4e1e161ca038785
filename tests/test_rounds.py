"""Whole engines whose draft rounds are captured steps, against plain ones.

On a machine with CUDA test_flight.py does this. Elsewhere the kernels run in Triton's interpreter (test_triton.py).
"""

from dataclasses import replace

import pytest
from speculation import WITH_HEAD, Fixed
from test_fixed import without_graphs
from test_flight import engine, loaded, requests
from test_triton import DEVICE, HERE, plain_numbers  # noqa: F401 (a fixture)

from bough import Engine
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.state.recordings import PLACE, Journal

pytestmark = pytest.mark.skipif(not HERE or DEVICE == "cuda", reason="needs triton's interpreter")


def answers(made: Engine) -> list:
    """To short requests that are read and written together."""
    some = [(prompt, replace(params, max_tokens=5)) for prompt, params in requests() if params.max_tokens > 5]
    return [handle.result() for handle in [made.submit(*each) for each in some[:3]]]


@pytest.mark.parametrize("family", WITH_HEAD)
def test_commits_that_the_next_round_does(family, monkeypatch):
    done, places = [], Journal.places

    def counted(self, *given):
        done.extend(found := places(self, *given))
        return found

    monkeypatch.setattr(Journal, "places", counted)
    with engine(family, ahead=False) as plain:
        expected = answers(plain)
    head = MTPDrafter(MTPHead(loaded(family, "cpu").model))
    with engine(family, ahead=False, draft=head) as made:
        without_graphs(made._runner.graphs, monkeypatch)
        made._loop.drafting.depth = Fixed(deepest=3)  # what rounds take in the interpreter would decide otherwise
        for _ in range(2):  # the second time from the cache
            for mine, other in zip(answers(made), expected, strict=True):
                assert (mine.tokens, mine.finish_reason) == (other.tokens, other.finish_reason)
        made._runner.pool.check()
    assert any(dict(zip(PLACE, place, strict=True))["owed"] > 0 for place in done)
