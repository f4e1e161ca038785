"""What an attention layer does to its heads before attention: norms, turns, and the new entries into their pages."""

from torch import Tensor

from bough.ops.attention import write_pages
from bough.ops.norm import Norm
from bough.ops.ragged import Pages
from bough.ops.rope import rotate
from bough.ops.twins import twins


def place_heads(
    q: Tensor,
    rotation: tuple[Tensor, Tensor],
    *,
    kv: tuple[Tensor, Tensor] | None = None,
    pages: Pages | None = None,
    norms: tuple[Norm | None, Norm | None, Norm | None] = (None, None, None),
) -> Tensor:
    """The queries q [T, H, k_dim], normed and turned; new `kv` are put where `pages` say.

    kv are K [T, Hkv, k_dim], normed and turned, and V [T, Hkv, v_dim], normed. The norms are those of q, k and v.
    """
    if (kv is None) != (pages is None):
        raise ValueError("place_heads takes K and V together with the pages that they go to")
    if (fast := twins(q)) is not None:
        return fast.place_heads(q, rotation, kv=kv, pages=pages, norms=norms)
    q_norm, k_norm, v_norm = norms
    if kv is not None and pages is not None:
        k, v = kv
        write_pages(rotate(_normed(k, k_norm), *rotation), _normed(v, v_norm), pages)
    return rotate(_normed(q, q_norm), *rotation)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)
