"""Documents that cannot rot: what is generated is up to date, what is stated holds."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli import COMMANDS, all_help, help_of
from kvd.config import SETTINGS
from kvd.config_docs import generated_files, sample_yaml
from kvd.config_flags import parse_flags
from kvd.config_load import load_config
from kvd.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".tcss", ".json", ".cpp", ".h", ".hpp", ""}
MAX_SOURCE_LINES = 400
MAX_TEST_LINES = 600  # a table of cases may be longer than a program
MAX_README_LINES = 150


def tracked_files() -> Iterator[Path]:
    """Every file of the project: what git lists, or, without git, what is no build output."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode == 0 and listing.stdout:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        ignored = (".venv", "build", "__pycache__", ".git", "kvd.egg-info")
        paths = [path for path in ROOT.rglob("*") if not any(part in ignored for part in path.parts)]
    yield from (path for path in paths if path.is_file())


def test_generated_files_are_up_to_date() -> None:
    for path, content in generated_files(ROOT, all_help()).items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name} is out of date: run `make docs`"


def test_the_sample_file_is_all_defaults() -> None:
    loaded = load_config(ROOT / "kvd.yaml")
    assert loaded.config == load_config().config
    assert not loaded.notices
    assert list(loaded.origins) == [name for name in SETTINGS if SETTINGS[name].show(SETTINGS[name].default) != "null"]
    assert sample_yaml() == (ROOT / "kvd.yaml").read_text(encoding="utf-8")


def test_every_setting_is_explained_once_in_a_sentence() -> None:
    texts = [setting.help for setting in SETTINGS.values()]
    assert len(set(texts)) == len(texts)
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), name
        assert setting.help[0].isupper(), name


def test_every_flag_and_key_is_documented() -> None:
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    help_text = help_of("serve", 80)
    for name, setting in SETTINGS.items():
        assert f"`{name}`" in document
        assert f"  {setting.flag}" in help_text
        if setting.environment:
            assert f"`{setting.environment}`" in document


def test_the_errors_in_the_document_are_the_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for text, flags in (
        ("\n" * 6 + "max_modle_len: 1\n", []),
        ("\n" * 8 + "max_num_seqs: 0\n", []),
        ("", ["--host", "0.0.0.0"]),
    ):
        Path("kvd.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(Path("kvd.yaml"), parse_flags(flags).entries)
        assert f"\nkvd: {caught.value}\n" in document


def test_every_command_is_documented() -> None:
    document = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"## kvd {command}\n" in document


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_help_keeps_to_the_width_of_the_terminal(width: int) -> None:
    from kvd.config_docs import settings_help

    assert all(len(line) <= max(width, 60) for line in settings_help(width).splitlines())


def test_every_environment_variable_in_the_source_is_documented() -> None:
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    names = set()
    for path in (*(ROOT / "kvd").rglob("*.py"), ROOT / "Makefile", ROOT / "packaging" / "make_venv.sh"):
        names |= set(re.findall(r"\bKVD_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    missing = sorted(name for name in names if f"`{name}`" not in document)
    assert not missing


def test_no_source_file_is_too_long() -> None:
    too_long = {}
    for path in tracked_files():
        if path.suffix in (".py", ".cpp", ".h", ".hpp", ".tcss", ".sh"):
            name = str(path.relative_to(ROOT))
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > (MAX_TEST_LINES if name.startswith("tests/") else MAX_SOURCE_LINES):
                too_long[name] = lines
    assert not too_long


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < MAX_README_LINES


def test_no_host_of_a_package_registry_is_named() -> None:
    """Where packages come from is the business of whoever installs: pip and npm know."""
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"),
                                           ("registry", "npmjs", "org"), ("deb", "debian", "org"))]  # fmt: skip
    offenders = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES:
            text = path.read_bytes().decode("utf-8", errors="replace")
            offenders += [f"{path.relative_to(ROOT)}: {host}" for host in hosts if host in text]
    assert not offenders


def test_every_python_file_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in ("kvd", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and not path.read_text(encoding="utf-8").lstrip().startswith('"""')
    ]
    assert not silent


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if "://" in target or target.startswith("#"):
                continue
            if not (path.parent / target.partition("#")[0]).exists():
                broken.append(f"{path.name}: {target}")
    assert not broken
