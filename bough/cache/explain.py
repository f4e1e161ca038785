"""Why a prompt hits as far as it does: the question that users of caches ask most."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bough.cache.tree import Node, Symbols, Tier

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens [start, end) that would be computed, and why."""

    start: int
    end: int
    reason: str  # never seen, evicted, no resume point, salted, too short, last token
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache knows of a prompt."""

    tokens: int
    matched: int
    resumable: int
    held: list[tuple[int, int, str]]  # (start, end, tiers) along the matched path
    losses: list[Loss]

    def lines(self) -> list[str]:
        """As people read it."""
        share = 100 * self.resumable / max(1, self.tokens)
        told = [f"{self.tokens} tokens: {self.matched} matched, {self.resumable} resumable ({share:.1f}%)"]
        told += [f"  [{start}, {end}) held on {tiers}" for start, end, tiers in self.held]
        told += [f"  [{each.start}, {each.end}) {each.reason}: {each.detail}" for each in self.losses]
        return told


def explain(cache: "PrefixCache", tokens: Symbols, salt: bytes) -> Explanation:
    walk = cache.tree.match(salt, tokens)
    resumable, _ = cache.resume(walk, len(tokens) - 1)
    held = [(node.start, min(node.end, walk.matched), _tiers(node)) for node in walk.nodes]
    losses = []
    last = len(tokens) - 1
    if resumable < min(walk.matched, last):
        detail = _no_point(cache, tokens, salt, resumable)
        losses.append(Loss(resumable, min(walk.matched, last), "no resume point", detail))
    losses += _unmatched(cache, tokens, salt, walk.matched, last)
    if len(tokens) == 1:
        losses.append(Loss(0, 1, "too short", "a single token is always computed: its logits are needed"))
    else:
        losses.append(Loss(last, last + 1, "last token", "always computed: its logits are needed"))
    return Explanation(len(tokens), walk.matched, resumable, held, losses)


def _tiers(node: Node) -> str:
    names = [
        tier.name.lower() + ("" if copy.resumes else " (no resume point)")
        for tier, copy in zip(Tier, node.copies, strict=True)
        if copy is not None and copy.is_sound
    ]
    return ", ".join(names)


def _no_point(cache: "PrefixCache", tokens: Symbols, salt: bytes, resumable: int) -> str:
    grave = cache.ledger.find(salt, tokens, resumable, "resume point")
    if grave is None:
        return "the tokens are known, but nothing was saved that a recurrent or windowed layer could go on from"
    return f"the one at {grave.length} left {grave.tier.name.lower()} {_ago(cache, grave.when)}"


def _unmatched(cache: "PrefixCache", tokens: Symbols, salt: bytes, matched: int, last: int) -> list[Loss]:
    """Why [matched, last) is not known: what was once, and what never was."""
    losses = []
    if matched < last and (lost := cache.ledger.find(salt, tokens, matched, "node")):
        end = min(lost.length, last)
        losses.append(Loss(matched, end, "evicted", f"it left {lost.tier.name.lower()} {_ago(cache, lost.when)}"))
        matched = end
    if matched < last:
        others = (cache.tree.match(other, tokens).matched for other in cache.tree.roots if other != salt)
        if (elsewhere := max(others, default=0)) > matched:
            detail = f"another cache_salt has {elsewhere} of these tokens; salts share nothing"
            losses.append(Loss(matched, last, "salted", detail))
        else:
            losses.append(Loss(matched, last, "never seen", "no earlier request went on like this"))
    return losses


def _ago(cache: "PrefixCache", when: float) -> str:
    return f"{max(0.0, cache.clock() - when):.0f} s ago"
