"""Qwen3: Llama with a norm on each head of q and k, and windows, if any, on its upper layers."""

from collections.abc import Mapping
from typing import Any

from bough.models.llama import Llama

WINDOW, FULL = "sliding_attention", "full_attention"


class Qwen3(Llama):
    head_norms = True
    defaults: Mapping[str, Any] = {"head_dim": 128, "max_window_layers": 28}

    def windows(self) -> list[int | None]:
        window = self.config.get("sliding_window") if self.config.get("use_sliding_window") else None
        lower = self.config.max_window_layers  # an older config.json counts the layers below the windows
        types = self.config.types_of_layers((WINDOW, FULL), lambda layer: FULL if layer < lower else WINDOW)
        return [window if each == WINDOW else None for each in types]
