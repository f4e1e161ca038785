"""Copies between a device and the host beside its computation: a stream of their own. A CPU does them at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """One stream of copies, in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._device = device
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied in here comes after what is computed so far, and beside what is computed later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._last = self._stream.record_event()

    @property
    def idle(self) -> bool:
        """Whether all copies are done."""
        return self._last is None or bool(self._last.query())  # type: ignore[no-untyped-call]

    def fence(self) -> None:
        """What is computed from here on comes after the copies so far. Nobody waits but the device."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()
