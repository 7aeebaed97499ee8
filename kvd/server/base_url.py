"""What base URL a client should have been given, judged by a route that does not exist. Pure functions.

The commonest fault of a client's settings is a base URL with `/v1` twice, or with a whole route at its end: the path
then ends in a known route behind something that does not belong there.
"""

from __future__ import annotations

import re

_MESSAGES = ("/messages", "/messages/count_tokens")
_OTHERS = ("/chat/completions", "/completions", "/responses", "/models", "/tokenize", "/detokenize")
_KNOWN_END = re.compile(f"(?P<before>.*?)(?P<route>{'|'.join((*_MESSAGES, *_OTHERS))})/*", re.DOTALL)


def mend_base_url(path: str, root: str) -> str | None:
    """What is wrong with the base URL, and the right one; None where `path` does not look like that.

    path: of an unknown route. root: `http://HOST:PORT` as the client addressed it.
    """
    found = _KNOWN_END.fullmatch(path)
    if found is None:
        return None
    before = found["before"]
    # Clients of the Messages protocol add /v1 themselves.
    right = root if found["route"] in _MESSAGES else f"{root}/v1"
    if before.count("/v1") > 1:
        return f"the base URL has /v1 twice; it is {right}"
    if "//" in path:
        return f"the base URL has a slash too many; it is {right}"
    return f"the base URL is {right}"
