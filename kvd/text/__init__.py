"""Text: from messages to token ids, and from token ids to text that can be shown.

`TextModel` and `OutputStream` are what other rooms use. They are loaded on first access, so that importing a
torch-free or dependency-free submodule of this package costs nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.text.detokenizer import OutputStream, TokenText
    from kvd.text.text_model import TextModel

__all__ = ["OutputStream", "TextModel", "TokenText"]


def __getattr__(name: str) -> object:
    if name == "TextModel":
        from kvd.text.text_model import TextModel

        return TextModel
    if name in ("OutputStream", "TokenText"):
        from kvd.text import detokenizer

        return getattr(detokenizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
