"""What grammars cost, without a model: compiling them, and the mask of allowed tokens of each step.

    python packaging/measure_grammar.py

Over the default model's vocabulary. For each grammar: the time to compile it (cold), the median and the slowest mask
while 200 random allowed tokens are accepted; hostile ones included. Prints one line each.
"""

from __future__ import annotations

import json
import random
import statistics
import time

import numpy as np

from kvd.config import Config
from kvd.errors import RequestError
from kvd.model.loading import read_spec, resolve_model
from kvd.model.progress import QuietProgress
from kvd.text.grammar import GrammarCompiler, GrammarSpec
from kvd.tools.serve import open_text

NUM_TOKENS = 200
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
DEEP = json.dumps({"type": "object", "properties": {f"field_{i}": {"anyOf": [PERSON] * 8} for i in range(100)}})
GRAMMARS = {
    "any JSON object": GrammarSpec("json_object"),
    "a small schema": GrammarSpec("json_schema", json.dumps(PERSON), strict=True),
    "a schema of 800 alternatives": GrammarSpec("json_schema", DEEP),
    "an enumeration of 5,000 texts": GrammarSpec("choice", tuple(f"choice number {i}" for i in range(5000))),
    "a schema with 5,000 values": GrammarSpec("json_schema", json.dumps({"enum": [f"value {i}" for i in range(5000)]})),
    "a date by regex": GrammarSpec("regex", r"\d{4}-\d{2}-\d{2}"),
    "hostile: nested repetition": GrammarSpec("regex", r"((a{1,100}){1,100}){1,100}"),
    "hostile: ambiguous grammar": GrammarSpec("lark", 'start: s\ns: s s s | s s | "a" | "b" |'),
}


def _measure(name: str, compiler: GrammarCompiler, spec: GrammarSpec, vocab_size: int) -> str:
    started = time.perf_counter()
    try:
        grammar = compiler.compile(spec)
    except RequestError as error:
        return f"{name}: refused after {(time.perf_counter() - started) * 1e3:.0f} ms ({error})"
    compile_seconds = time.perf_counter() - started
    matcher, chance = grammar.start(), random.Random(1)
    mask, seconds = grammar.first_mask, []
    for _ in range(NUM_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        going_on = [int(each) for each in allowed if int(each) not in grammar.end_token_ids]
        if not going_on or matcher.error is not None:
            break
        token_id = chance.choice(going_on)
        started = time.perf_counter()
        matcher.accept(token_id)
        mask = matcher.mask()
        seconds.append(time.perf_counter() - started)
    if not seconds:
        return f"{name}: compiled in {compile_seconds * 1e3:.0f} ms; nothing to choose"
    median, slowest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    end = "" if matcher.error is None else f", then given up: {matcher.error}"
    return (
        f"{name}: compiled in {compile_seconds * 1e3:.0f} ms; mask {median:.2f} ms at the median, "
        f"{slowest:.1f} ms at most ({len(seconds)} tokens){end}"
    )


def main() -> None:
    config = Config()
    files = resolve_model(config.model, home=config.home_path, revision=None, progress=QuietProgress())
    text = open_text(config, files)
    vocab_size = read_spec(files).vocab_size
    compiler = text.open_grammars(end_token_ids=files.eos_token_ids, num_logits=vocab_size)
    compiler.compile(GrammarSpec("regex", "warm"))
    for name, spec in GRAMMARS.items():
        print(_measure(name, compiler, spec, vocab_size))


if __name__ == "__main__":
    main()
