"""Takes needless work off Triton's interpreter, so that tests can afford more programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import triton.language as tl
import triton.runtime.interpreter as interpreter


@contextmanager
def quick_device_calls() -> Iterator[None]:
    """Inside, a device function that a kernel calls does not replace the language's functions once more.

    The interpreter replaces them at the launch of a kernel, and again, to no effect, at every call of a `triton.jit`
    function from within one, which takes longer than most of these functions do.
    """
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        # Kernels see `tl`, the functions of the standard library `tl.core`.
        seen = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
        return patch(fn) if any(tl.core.is_builtin(module.load) for module in seen) else None

    with mock.patch.object(interpreter, "_patch_lang", patch_once):
        yield
