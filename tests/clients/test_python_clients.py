"""Clients from PyPI, as their users run them: told a base URL and a key, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvd.model.files import ModelFiles
from tests.clients.conftest import MODEL, PROGRAMS, Endpoint

pytestmark = pytest.mark.clients

TASKS = Path(__file__).resolve().parent / "tasks"


# --------------------------------------------------------------------------- llm


@pytest.fixture
def llm(endpoint: Endpoint) -> Endpoint:
    """Simon Willison's llm, configured by its own file and its own key store."""
    model = {
        "model_id": "kvd",
        "model_name": MODEL,
        "api_base": endpoint.base_url,
        "api_key_name": "kvd",
        "supports_schema": True,
    }
    (endpoint.folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    endpoint.run(
        "general", "llm", "keys", "set", "kvd", "--value", endpoint.api_key, LLM_USER_PATH=str(endpoint.folder)
    )
    return endpoint


def ask_llm(llm: Endpoint, *words: str) -> str:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "60")
    return llm.run("general", "llm", "prompt", "-m", "kvd", *options, *words, LLM_USER_PATH=str(llm.folder)).strip()


def test_llm_answers_whole_and_streamed(llm: Endpoint) -> None:
    question = "Tell me the capital of France."
    streamed = ask_llm(llm, question)
    assert "Paris" in streamed
    assert ask_llm(llm, "--no-stream", question) == streamed


def test_llm_goes_on_with_a_conversation(llm: Endpoint) -> None:
    ask_llm(llm, "-s", "You are brief.", "My name is Zoë.")
    assert "Zoë" in ask_llm(llm, "-c", "Repeat: Zoë")
    logged = json.loads(llm.run("general", "llm", "logs", "--json", LLM_USER_PATH=str(llm.folder)))
    assert len({entry["conversation_id"] for entry in logged}) == 1
    assert all(entry["input_tokens"] for entry in logged)


def test_llm_gets_what_its_schema_demands(llm: Endpoint) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = json.loads(ask_llm(llm, "--schema", json.dumps(schema), "Invent a dog."))
    assert set(answer) == {"name", "age"}
    assert isinstance(answer["age"], int)


# --------------------------------------------------------------------------- LangChain


def test_langchain_passes_its_own_standard_tests(endpoint: Endpoint) -> None:
    """Both protocols; see programs/langchain_standard.py for what is left out and why."""
    program = PROGRAMS / "langchain_standard.py"
    # One loop for all: LangChain keeps its asynchronous connections from test to test.
    loops = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session")
    options = ("-c", "/dev/null", "--rootdir", str(endpoint.folder), "-q", "--noconftest", "-p", "no:cacheprovider")
    output = endpoint.run("general", "pytest", *options, *loops, str(program))
    match = re.search(r"(\d+) passed", output)
    assert match, output
    assert int(match[1]) > 40, output


# --------------------------------------------------------------------------- aider


EDIT = r'greet\.py\n```\ndef greet\(\) -> str:\n    return "hello [a-z]{2,9}"\n```\n'
"""What a model this small would not write by itself: a whole file in aider's form. The request holds it to this."""


def test_aider_edits_a_repository_of_one_file(endpoint: Endpoint) -> None:
    source = endpoint.folder / "greet.py"
    source.write_text('def greet() -> str:\n    return "hello"\n')
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "Begin")):
        subprocess.run(["git", *words], cwd=endpoint.folder, check=True, env=endpoint.environment)
    name = f"openai/{MODEL}"
    limits = {name: {"max_input_tokens": 8192, "max_output_tokens": 256, "mode": "chat", "litellm_provider": "openai"}}
    extra = {"max_tokens": 256, "extra_body": {"structured_outputs": {"regex": EDIT}}}
    settings = [{"name": name, "edit_format": "whole", "use_temperature": 0, "extra_params": extra}]
    (endpoint.folder / "limits.json").write_text(json.dumps(limits))
    (endpoint.folder / "settings.yml").write_text(json.dumps(settings))
    output = endpoint.run(
        "aider", "aider", "--model", name, "--openai-api-base", endpoint.base_url, "--openai-api-key", endpoint.api_key,
        "--model-metadata-file", "limits.json", "--model-settings-file", "settings.yml", "--weak-model", name,
        "--message", "Say hello to the world instead.", "--yes-always", "--no-auto-commits", "--map-tokens", "0",
        "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-pretty", "--no-gitignore",
        "--no-show-model-warnings", "--no-suggest-shell-commands", "greet.py",
        LITELLM_LOCAL_MODEL_COST_MAP="True", GIT_CONFIG_NOSYSTEM="1",
    )  # fmt: skip
    assert "Applied edit to greet.py" in output, output
    assert re.search(r"Tokens: [\d.,k]+ sent, [\d.,k]+ received", output), output
    assert re.fullmatch(r'def greet\(\) -> str:\n    return "hello [a-z]{2,9}"\n', source.read_text())


# --------------------------------------------------------------------------- lm-evaluation-harness


def test_lm_eval_scores_a_task(endpoint: Endpoint, default_model_files: ModelFiles) -> None:
    """Log-likelihoods of batched token ids: `echo` with `logprobs`."""
    tokenizer = endpoint.folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(default_model_files.tokenizer_json.read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    for path in TASKS.iterdir():
        (endpoint.folder / path.name).write_bytes(path.read_bytes())
    arguments = {
        "model": MODEL,
        "base_url": f"{endpoint.base_url}/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
    }
    endpoint.run(
        "general", "lm-eval", "run", "--model", "local-completions", "--tasks", "capitals", "--include_path",
        str(endpoint.folder), "--model_args", json.dumps(arguments), "--batch_size", "4", "--output_path", "results",
        "--log_samples", OPENAI_API_KEY=endpoint.api_key,
    )  # fmt: skip
    (path,) = (endpoint.folder / "results").rglob("results_*.json")
    scores = json.loads(path.read_text())["results"]["capitals"]
    assert scores["acc,none"] >= 0.75, "a model that was read rightly knows most of these"
