"""What Triton's interpreter does over and over, done once: most of its time goes there, and little into numbers.

What kernels read, compute and write stays as it is. This is written for the insides of Triton 3.6.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest


@contextmanager
def faster() -> Iterator[None]:
    """A third of the time, or less, where kernels are of many small operations and functions."""
    import triton.language as tl
    from triton.runtime import interpreter

    core, builder = tl.core, interpreter.interpreter_builder
    # The language is patched at each launch and at each call of a function in it. Here it is until the end.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        # Whether whole numbers overflow is computed for each sum and product, and looked at in its debug mode alone.
        assert not builder.options.debug
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", _dtypes(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", _blocks(core))
        patch.setattr(core.tensor, "__init__", _tensors(core))
        yield
    scope.restore()


def _dtypes(find):
    known = {}

    def dtype(of):
        name = of.scalar.name
        if name not in known:
            known[name] = find(of)
        return known[name]

    return dtype


def _blocks(core):
    make, known = core.block_type.__init__, {}

    def init(self, element_ty, shape):
        key = element_ty.name, *(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, known[key]

    return init


def _tensors(core):
    @cache
    def lengths(*shape: int):
        return core.tuple([core.constexpr(each) for each in shape]), core.constexpr(core.math.prod(shape))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = lengths(*(type.shape if type.is_block() else ()))

    return init
