"""Text to token ids, with control tokens where we say and nowhere else.

Purpose: encode a text whose control tokens are given by place, exactly as `tokenizers` encodes it in one go.
Owner: made once at load, read-only after; any number of threads may encode at once.

How: in a private copy of the tokenizer every control token is renamed to a secret string, its id kept. A control
token that somebody typed is then ordinary text to it; where the template put one, its secret name is written before
encoding. Everything else, such as how a text is split around control tokens, is the tokenizer's own doing.
What the tokenizer's post-processor would add is left out: whether a prompt begins with BOS is the caller's decision.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvd.errors import CheckpointError, ContextLengthExceeded, RequestError, StartupError
from kvd.text.literals import ControlTokens
from kvd.text.token_table import TokenTable

_LONG_CHARACTERS = 4096
_EXACT_CHARACTERS = 2**18
"""A text up to here is encoded and counted whatever the limit; tokens take some 400 bytes each on the way."""
_CHARACTERS_PER_TOKEN = 8
_CUT_TOKENS = 128
"""More than a text gains in tokens when it is cut off: its last word, or a secret name, falls into pieces."""

_CONTROL_FORM = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)


class Tokenizer:
    """One model's tokenizer.

    control      which of its tokens are control tokens
    control_ids  their ids by text
    table        the bytes of every token
    vocab_size   one more than the highest token id
    """

    def __init__(self, path: Path, *, template_text: str = "") -> None:
        """`template_text`: what the chat template writes; an added token in it is a control token.

        So is every token marked special and every one of the form `<|…|>`. Other added tokens (runs of spaces, HTML
        tags, plain words) are vocabulary.
        Raises CheckpointError for a file that cannot be read, UnsupportedModel for a kind that is not known.
        """
        content = _read_json(path)
        try:
            added: dict[int, dict[str, Any]] = {token["id"]: token for token in content.get("added_tokens") or ()}
            vocabulary = _vocabulary(content["model"], added)
            self.table = TokenTable(content, vocabulary, {id_: bool(token["special"]) for id_, token in added.items()})
            hidden = {id_: token["content"] for id_, token in added.items() if token["special"]}
            visible = {
                id_: token["content"]
                for id_, token in added.items()
                if not token["special"]
                and (token["content"] in template_text or _CONTROL_FORM.fullmatch(token["content"]))
                and not token["content"].isspace()
            }
            self.control = ControlTokens(hidden.values(), visible.values())
            self.control_ids = {text: id_ for id_, text in (hidden | visible).items()}
            secret = secrets.token_hex(16)
            self._secret_names = {text: f"\ue000{secret}.{id_}\ue001" for text, id_ in self.control_ids.items()}
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(_renamed(content, self._secret_names)))
        except StartupError:
            raise
        # tokenizers raises Exception itself, and a file of the wrong shape fails in many ways here.
        except Exception as error:
            raise CheckpointError(f"{path}: not a tokenizer that can be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for text, token_id in self.control_ids.items():
            if self._tokenizer.token_to_id(self._secret_names[text]) != token_id:
                raise CheckpointError(f"{path}: the added token {text!r} does not get its id {token_id}")
        self.vocab_size = len(self.table.token_bytes)

    def encode(
        self, text: str, control_spans: Sequence[tuple[int, int]] = (), *, limit_tokens: int | None = None
    ) -> list[int]:
        """Token ids of `text`, in which exactly `control_spans` are control tokens.

        Raises RequestError for text that is not valid Unicode (an unpaired surrogate), and ContextLengthExceeded for
        text far longer than `limit_tokens`, of which only the beginning is looked at: memory follows the limit, not
        the text. A text that is a little too long is encoded.
        """
        if control_spans:
            parts: list[str] = []
            position = 0
            for start, end in control_spans:
                parts += (text[position:start], self._secret_names[text[start:end]])
                position = end
            parts.append(text[position:])
            text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("the text has an unpaired surrogate, which is not a character") from error
        if limit_tokens is not None:
            self._refuse_endless(text, limit_tokens)
        return self._ids(text)

    def _refuse_endless(self, text: str, limit_tokens: int) -> None:
        num_characters = max(_EXACT_CHARACTERS, _CHARACTERS_PER_TOKEN * limit_tokens)
        while num_characters < len(text):
            least = len(self._ids(text[:num_characters])) - _CUT_TOKENS
            if least >= limit_tokens:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {limit_tokens} tokens, but the prompt has more than "
                    f"{least} tokens, which leaves no room for an answer.",
                    num_prompt_tokens=least,
                    limit_tokens=limit_tokens,
                )
            num_characters *= 2

    def _ids(self, text: str) -> list[int]:
        if len(text) <= _LONG_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:  # only the methods for batches let other threads run meanwhile
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(f"{path}: not a tokenizer.json")
    return content


def _vocabulary(model: dict[str, Any], added: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Token text of each id, from the model and the added tokens."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        tokens = {id_: token for token, id_ in vocab.items()}
    else:
        tokens = {id_: entry[0] for id_, entry in enumerate(vocab)}
    return tokens | {id_: token["content"] for id_, token in added.items()}


def _renamed(content: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A copy of a tokenizer.json in which the tokens in `names` are called otherwise, with their ids.

    They are matched in the raw text, wherever they stand. Random choices of the model (dropout) are switched off.
    """
    model = dict(content["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocab.items()}
        in_vocab = names.keys() & vocab.keys()
    else:
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
        in_vocab = names.keys() & {entry[0] for entry in vocab}
    if in_vocab and model.get("merges"):
        # Text that merges into a control token stays in pieces.
        model["merges"] = [merge for merge in model["merges"] if not _merged(merge) & in_vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("dropout"):
        model["dropout"] = None
    added = []
    for token in content.get("added_tokens") or ():
        if token["content"] in names:
            token = {
                **token, "content": names[token["content"]], "special": True, "normalized": False, "single_word": False,
            }  # fmt: skip
        added.append(token)
    return {**content, "model": model, "added_tokens": added, "post_processor": None}


def _merged(merge: str | list[str]) -> set[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}
