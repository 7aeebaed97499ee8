"""Hostile HTTP requests, made from a seed: bodies that are almost right, and bytes that are no HTTP at all.

A request is a list of `Step`s on one connection. Nothing in here knows what the server should answer; the test holds
every answer to the same few rules.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_BODY_BYTES = 256 * 1024
"""The server's limit in this test; sizes around it are tried."""


@dataclass(frozen=True, slots=True)
class Step:
    """Send `data`, then wait; `half_close` ends our side, `leave` drops the connection without reading an answer."""

    data: bytes = b""
    wait_seconds: float = 0.0
    half_close: bool = False
    leave: bool = False


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_CHAT: dict[str, Any] = {
    "model": "alias", "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1,
    "stop": ["x"], "stop_token_ids": [7], "logit_bias": {"7": 1.0}, "logprobs": True, "top_logprobs": 2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 0,
    "ignore_eos": False, "cache_salt": "s", "priority": 0, "kv_eviction": "none", "stream": True,
    "stream_options": {"include_usage": True}, "tools": [_TOOL], "tool_choice": "auto",
    "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "user": "u", "metadata": {},
}  # fmt: skip
_COMPLETION: dict[str, Any] = {
    "model": "alias", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": False, "n": 1, "best_of": 1,
    "stop": "x", "logit_bias": {"7": -1}, "stream": False, "seed": 3, "suffix": None, "temperature": 0,
}  # fmt: skip
_RESPONSES: dict[str, Any] = {
    "model": "alias", "instructions": "i", "stream": True, "max_output_tokens": 3, "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}],
    "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "store": False,
}  # fmt: skip
_MESSAGES: dict[str, Any] = {
    "model": "alias", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "stream": True, "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": False}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"], "temperature": 1.0, "top_k": 5, "thinking": {"type": "enabled", "budget_tokens": 1024},
}  # fmt: skip
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", _COMPLETION),
    ("/v1/responses", _RESPONSES),
    ("/v1/messages?beta=true", _MESSAGES),
    ("/v1/messages/count_tokens", {key: value for key, value in _MESSAGES.items() if key != "stream"}),
    ("/tokenize", {"model": "alias", "prompt": "abc", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True}),
    ("/detokenize", {"model": "alias", "tokens": [1, 2, 3]}),
    ("/kvd/cache/pin", {"chain": "ab" * 16}),
    ("/kvd/cache/unpin", {"chain": "ab" * 16}),
    ("/kvd/sessions/work/save", {"chain": "ab" * 16}),
)
"""A valid body for every route that reads one."""

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "x", "\0", "\ud800", "é\u2028", "null", "1", "auto", "required", "none", "<|im_end|>", "{{ 7*7 }}",
    "x" * 5000, [], [[]], [None], [1, "a"], ["a"] * 40, [0] * 600, {}, {"": None}, {"type": "x"}, {"type": "function"},
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}},
    {"a": {"b": [{"c": {}}]}},
)  # fmt: skip


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield prefix
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*prefix, key))


ALL_PATHS = tuple((route, body, path) for route, body in BODIES for path in _paths(body))


def _replace(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replace(value[path[0]], path[1:], change)
    return copy


class Hostility:
    """An endless supply of hostile requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0
        # Kind and weight. The slow ones wait for a time limit of the server's.
        self._kinds: list[tuple[Callable[[], list[Step]], int]] = [
            (self._wrong_value, 60), (self._broken_json, 10), (self._odd_target, 6), (self._odd_headers, 6),
            (self._odd_framing, 5), (self._bad_chunks, 4), (self._compressed, 3), (self._huge, 1),
            (self._half_closed, 3), (self._gone, 3), (self._garbage, 2), (self._pipelined, 2), (self._slow, 1),
        ]  # fmt: skip

    def request(self) -> list[Step]:
        """The next one."""
        makers, weights = zip(*self._kinds, strict=True)
        maker: Callable[[], list[Step]] = self._random.choices(makers, weights)[0]
        return maker()

    # ------------------------------------------------------------------ bodies

    def _wrong_value(self) -> list[Step]:
        """Every path of every body in turn, with a value of a wrong kind, or missing, or there twice."""
        route, body, path = ALL_PATHS[self._number % len(ALL_PATHS)]
        self._number += 1
        changed = _replace(body, path, lambda _: self._random.choice(_VALUES))
        data = json.dumps(changed).encode()
        match self._random.randrange(12):
            case 0 if path:
                parent: Any = changed
                for key in path[:-1]:
                    parent = parent[key]
                del parent[path[-1]]
                data = json.dumps(changed).encode()
            case 1:
                depth = self._random.choice((50, 600, 5000))
                data = data.replace(b'"hi"', b"[" * depth + b"]" * depth, 1)
            case 2 if data.startswith(b"{"):
                data = b'{"model": 5, "stream": "x", ' + data[1:]
        return [Step(self._post(route, data))]

    def _broken_json(self) -> list[Step]:
        route, body = self._random.choice(BODIES)
        data = bytearray(json.dumps(body).encode())
        for _ in range(self._random.randint(1, 4)):
            position = self._random.randrange(len(data) + 1)
            match self._random.randrange(4):
                case 0:
                    del data[position : position + self._random.randint(1, 30)]
                case 1:
                    data[position:position] = self._random.randbytes(3)
                case 2:
                    data[position:position] = self._random.choice((b"{", b"]", b'"', b",", b"\\u", b"NaN", b"\xff"))
                case 3:
                    del data[position:]
        return [Step(self._post(route, bytes(data)))]

    def _compressed(self) -> list[Step]:
        route, body = self._random.choice(BODIES)
        plain = json.dumps(body).encode()
        kind, data = self._random.choice(
            (
                (b"gzip", gzip.compress(plain)),
                (b"gzip", gzip.compress(plain)[:-9]),
                (b"gzip", plain),
                (b"gzip", gzip.compress(b" " * (4 * MAX_BODY_BYTES))),
                (b"deflate", zlib.compress(plain)),
                (b"deflate", b"\xff" * 30),
                (b"br", plain),
                (b"zstd", plain),
                (b"\x7f", plain),
                (b"gzip, gzip", gzip.compress(gzip.compress(plain))),
            )
        )
        return [Step(self._post(route, data, b"Content-Encoding: " + kind + b"\r\n"))]

    # ------------------------------------------------------------------ framing

    def _post(self, route: str, body: bytes, more: bytes = b"", length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n".encode()
        return head + more + b"\r\n" + body

    def _odd_target(self) -> list[Step]:
        target = self._random.choice(
            (
                "/v1/v1/chat/completions", "//v1/models", "/v1/models/%00", "/v1/models/" + "a" * 7000, "/%ff%fe",
                "/v1/../v1/models", "/v1/models/..%2f..", "*", "http://evil.example/v1/models", "/v1/models?limit=%",
                "/kvd/cache/prefixes?limit=-1", "/kvd/cache/prefixes?limit=99999999999999999999", "/#", "/\\",
                "/kvd/cache/prefixes?limit=" + "1" * 3000, "/kvd/requests/%2e%2e/abort", "/kvd/requests/x/keep",
                "/kvd/sessions/..%2Fx/save", "/kvd/sessions/" + "n" * 65 + "/restore", "/v1/models/alias%2F",
                "/openapi.json", "/health", "/metrics", "/kvd/snapshot", "/kvd/requests", "/v1/messages/batches",
            )
        )  # fmt: skip
        method = self._random.choice(("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE", "FOO"))
        return [Step(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())]

    def _odd_headers(self) -> list[Step]:
        header = self._random.choice(
            (
                b"Host: evil.example", b"Host: ", b"Host: [::1", b"Host: localhost:99999999", b"Origin: null",
                b"Origin: http://[", b"Origin: https://evil.example", b"Origin: http://localhost:x",
                b"Authorization: " + b"A" * 6000, b"Authorization: Bearer \xff\xfe", b"x-api-key: \xc3\x28",
                b"Content-Type: text/html", b"Content-Type: multipart/form-data; boundary=", b"Content-Type: \x01",
                b"Expect: 100-continue", b"Expect: miracles", b"Upgrade: websocket\r\nConnection: Upgrade",
                b"X: " + b"y" * 20_000, b"X\x00Y: z", b"X : z", b" X: z", b"X", b": z", b"X: a\rb",
                b"\r\n".join(b"X-%d: y" % number for number in range(300)), b"Connection: close, keep-alive",
                b"User-Agent: \xf0\x9f\x98\x80" + b"\xe9" * 200, b"Access-Control-Request-Method: POST\r\nOrigin: null",
                b"anthropic-beta: " + b"x," * 500, b"Cookie: a=b; \xff", b"Content-Encoding: ", b"Accept: \xff",
            )
        )  # fmt: skip
        route, body = self._random.choice(BODIES)
        return [Step(self._post(route, json.dumps(body).encode(), header + b"\r\n"))]

    def _odd_framing(self) -> list[Step]:
        body = json.dumps({"prompt": "abc"}).encode()
        lines = self._random.choice(
            (
                b"Content-Length: -1", b"Content-Length: x", b"Content-Length: 1e3", b"Content-Length: +15",
                b"Content-Length: 15\r\nContent-Length: 16", b"Content-Length: 15\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: gzip", b"Transfer-Encoding: identity",
                b"Content-Length: 99999999999999999999", b"Content-Length: " + b"9" * 5000, b"Content-Length: 0x10",
                b"Content-Length:", b"Transfer-Encoding : chunked", b"Content-Length: 15, 15",
            )
        )  # fmt: skip
        return [Step(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n\r\n" + body)]

    def _bad_chunks(self) -> list[Step]:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = self._random.choice(
            (
                b"zz\r\n", b"-1\r\n", b"5\r\nabc", b"5\r\nabcdefgh\r\n0\r\n\r\n", b"ffffffffffffffffff\r\nx",
                b"0x5\r\nabcde\r\n", b"5;" + b"e" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n", b"\r\n", b"5\nabcde\n0\n\n",
                b"10\r\n" + b'{"prompt":"abc"}' + b"\r\n0\r\nX: " + b"t" * 20_000 + b"\r\n\r\n",
                b"10\r\n" + b'{"prompt":"abc"}' + b"\r\n0\r\nTrailer\r\n\r\n", b"1\r\n \r\n" * 500, b"0\r\n\r\n",
                b"10\r\n" + b'{"prompt":"abc"}' + b"\r\n0\r\n\r\n",
            )
        )  # fmt: skip
        return [Step(head), Step(chunks)]

    def _huge(self) -> list[Step]:
        size = self._random.choice((MAX_BODY_BYTES - 100, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 4 * MAX_BODY_BYTES))
        body = b'{"model": "alias", "messages": [{"role": "user", "content": "' + b"x" * (size - 80) + b'"}], "n": 1}'
        if self._random.random() < 0.5:
            return [Step(self._post("/v1/chat/completions", body))]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
        steps = [Step(b"%x\r\n%s\r\n" % (len(piece), piece)) for piece in pieces]
        return [Step(head), *steps, Step(b"0\r\n\r\n")]

    def _half_closed(self) -> list[Step]:
        route, body = self._random.choice(BODIES)
        data = self._post(route, json.dumps(body).encode())
        end = self._random.choice((len(data), len(data) - 1, self._random.randrange(len(data))))
        return [Step(data[:end], half_close=True)]

    def _gone(self) -> list[Step]:
        """A client that leaves: in the middle of its request, or of the answer."""
        route, body = self._random.choice(BODIES)
        data = self._post(route, json.dumps({**body, "max_tokens": 200, "stream": True}).encode())
        end = self._random.choice((len(data), len(data), self._random.randrange(len(data))))
        return [Step(data[:end], wait_seconds=self._random.choice((0.0, 0.001, 0.01)), leave=True)]

    def _garbage(self) -> list[Step]:
        return [Step(self._random.randbytes(self._random.choice((1, 40, 3000))) + b"\r\n\r\n")]

    def _pipelined(self) -> list[Step]:
        requests = [self._wrong_value()[0].data for _ in range(self._random.randint(2, 5))]
        return [Step(b"".join(requests) + self._random.choice((b"", b"GARBAGE\r\n\r\n")))]

    def _slow(self) -> list[Step]:
        """A body that comes in drops, or stops coming."""
        body = json.dumps({"prompt": "abc"}).encode()
        data = self._post("/tokenize", body, length=len(body) + self._random.choice((0, 1000)))
        cuts = sorted(self._random.sample(range(1, len(data)), 5))
        return [
            Step(data[start:end], wait_seconds=0.02) for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
        ]
