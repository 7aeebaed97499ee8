"""Clients from npm: the official one, and Vercel's AI SDK with its provider for OpenAI-compatible servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import FOLDER, PROGRAMS, Endpoint

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here"),
]

CITIES = ("Paris", "Rome")


def run_node(endpoint: Endpoint, name: str) -> Any:
    """The JSON that a program prints; it finds its packages in the folder that it lies in."""
    shutil.copy(PROGRAMS / name, endpoint.folder)
    (endpoint.folder / "node_modules").symlink_to(FOLDER / "node" / "node_modules")
    node = shutil.which("node")
    assert node is not None
    return json.loads(endpoint.run_path(Path(node), name, variables={}))


def test_openai(endpoint: Endpoint) -> None:
    results = run_node(endpoint, "openai.mjs")
    assert "Paris" in results["whole"]
    assert results["streamed"] == results["response"] == results["whole"]
    assert results["isUsageSame"]
    assert results["call"]["name"] == "weather"
    assert json.loads(results["call"]["arguments"])["city"] in CITIES
    assert json.loads(results["structured"])["city"] in CITIES
    assert results["error"] == {"status": 404, "code": "model_not_found"}


def test_ai_sdk(endpoint: Endpoint) -> None:
    results = run_node(endpoint, "ai.mjs")
    assert "Paris" in results["whole"]
    assert results["streamed"] == results["whole"]
    assert results["isUsageSame"]
    assert results["finishReason"] in ("stop", "length")
    assert results["calls"]
    for call in results["calls"]:
        assert call["toolName"] == "weather"
        assert call["input"]["city"] in CITIES
    assert results["object"]["city"] in CITIES
    assert results["error"]["status"] == 404
    assert "absent" in results["error"]["message"]
