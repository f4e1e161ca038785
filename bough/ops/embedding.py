"""The rows of a table that tokens stand for."""

import torch.nn.functional as F
from torch import Tensor

from bough.ops.twins import twins


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Of tokens [T] and a table [V, d] the rows [T, d]."""
    if (fast := twins(table)) is not None:
        rows: Tensor = fast.embedding(tokens, table)
        return rows
    return F.embedding(tokens, table)
