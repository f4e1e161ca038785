"""Which drafter an option means."""

import os
from typing import Any

from bough.draft import Drafter
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.draft.ngram import NGram
from bough.models.model import Model

DraftOption = str | os.PathLike[str] | Drafter | None


def drafter_for(option: Any, target: Model) -> Drafter | None:
    if option is None:
        return None
    if option == "mtp" or (option == "auto" and target.extra):
        return MTPDrafter(MTPHead(target))
    if option in ("auto", "ngram"):
        return NGram()
    return option
