"""Who may import whom: the table of rooms, held by the source and by what a process really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LEAVES = (
    "kvd", "kvd.errors", "kvd.core", "kvd.views", "kvd.insight", "kvd.device_facts", "kvd.geometry", "kvd.log",
    "kvd.histograms", "kvd.openmp", "kvd.config", "kvd.config_*",
)  # fmt: skip

ALLOWED: dict[str, tuple[str, ...]] = {
    "kvd.cli": ("*",),
    "kvd.cli_usage": LEAVES,
    "kvd.__main__": ("*",),
    "kvd.tools": ("*",),
    "kvd.server": ("kvd.engine.engine", "kvd.text", "kvd.observe", *LEAVES),
    "kvd.text": LEAVES,
    "kvd.engine": ("kvd.scheduler", "kvd.cache", "kvd.model", "kvd_kernels", "kvd.text.grammar", *LEAVES),
    "kvd.scheduler": ("kvd.cache.manager", *LEAVES),
    "kvd.cache.store": ("kvd.cache", "kvd_kernels.ops", "kvd_kernels.kv_format", *LEAVES),  # alone holds tensors
    "kvd.cache": ("kvd.model.spec", "kvd_kernels.kv_format", *LEAVES),
    "kvd.model": ("kvd_kernels", *LEAVES),
    "kvd.observe": LEAVES,
    "kvd.tui": ("kvd.cache.sizing", "kvd.cache.fitting", "kvd.cache.lengths", *LEAVES),
    "kvd_kernels": (),
}
"""Room → what its files may import of kvd and kvd_kernels, besides itself."""

NUMERIC = ("torch", "numpy", "triton")
WITHOUT_TORCH = ("kvd.scheduler", "kvd.observe", "kvd.tui", "kvd.server", "kvd.text", "kvd.cli", *LEAVES)
TENSOR_FILE_OF_CACHE = "kvd.cache.store"


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of kvd and kvd_kernels."""
    for package, folder in (("kvd", ROOT / "kvd"), ("kvd_kernels", ROOT / "kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imports_of(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, under its full name; `from a import b` gives `a.b` too."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if is_package else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_within(module: str, places: tuple[str, ...]) -> bool:
    """Whether `module` is one of `places` or lies in it; a star matches the rest of a name."""
    for place in places:
        if place == "*" or module == place or (place != "kvd" and module.startswith(place + ".")):
            return True
        if place.endswith("*") and module.startswith(place[:-1]):
            return True
    return False


def room_of(module: str) -> str | None:
    """The room of a module by the table; None for a leaf."""
    if is_within(module, LEAVES):
        return None
    return next((room for room in ALLOWED if is_within(module, (room,))), "unknown")


def violations() -> list[str]:
    known = dict(modules())
    found = []
    for name, path in known.items():
        room = room_of(name)
        if room == "unknown":
            found.append(f"{name} lies in no room of the table")
            continue
        allowed = LEAVES if room is None else (room, *ALLOWED[room])
        for imported in set(imports_of(name, path)):
            if imported.split(".")[0] not in ("kvd", "kvd_kernels"):
                continue
            module = imported if imported in known else imported.rpartition(".")[0]
            # `from kvd.x import name` yields kvd.x as well: judge real modules alone.
            if module in known and imported in known and not is_within(module, allowed):
                found.append(f"{name} imports {module}")
    return sorted(found)


def test_every_room_imports_what_the_table_allows() -> None:
    assert violations() == []


def test_torch_stays_where_tensors_are() -> None:
    found = []
    for name, path in modules():
        in_cache = is_within(name, ("kvd.cache",)) and name != TENSOR_FILE_OF_CACHE
        if not (is_within(name, WITHOUT_TORCH) or in_cache or name == "kvd_kernels.kv_format"):
            continue
        found += [f"{name} imports {module}" for module in imports_of(name, path) if module.split(".")[0] == "torch"]
    assert found == []


def test_kernels_need_numeric_packages_alone() -> None:
    allowed = {*sys.stdlib_module_names, *NUMERIC, "kvd_kernels"}
    found = []
    for name, path in modules():
        if name.startswith("kvd_kernels"):
            found += [f"{name}: {module}" for module in imports_of(name, path) if module.split(".")[0] not in allowed]
    assert found == []


def test_leaves_need_the_standard_library_alone() -> None:
    """yaml is imported where a file is read, inside the functions that do."""
    allowed = {*sys.stdlib_module_names, "kvd", "yaml"}
    found = []
    for name, path in modules():
        if is_within(name, LEAVES):
            found += [f"{name}: {module}" for module in imports_of(name, path) if module.split(".")[0] not in allowed]
    assert found == []


DEVICE_NAMES = ("cuda", "gpu", "triton", "cpu", "reference")
KNOWS_BACKENDS = ("kvd.engine.backend", "kvd.config", "kvd.config_*", "kvd.tools", "kvd.cli", "kvd.tui.device")
"""The place that chooses a backend, the settings that name one, commands that compare some, and what tells people."""


def device_questions(path: Path) -> Iterator[str]:
    """Where a file asks which device or backend it runs on: a comparison with a name, torch.cuda, is_cuda."""

    def names_in(node: ast.AST) -> bool:
        texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        return any(isinstance(text, str) and text.partition(":")[0] in DEVICE_NAMES for text in texts)

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_test = isinstance(node, ast.Compare) and names_in(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_test = node.func.attr in ("startswith", "endswith") and any(names_in(value) for value in node.args)
        if isinstance(node, ast.match_case):
            is_test = names_in(node.pattern)
        if isinstance(node, ast.Attribute):
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            is_test = node.attr in ("is_cuda", "is_cpu") or (is_torch and node.attr == "cuda")
        if is_test:
            yield f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


def test_nobody_but_the_backend_asks_which_device_computes() -> None:
    found = []
    for name, path in modules():
        if name.startswith("kvd_kernels") or is_within(name, KNOWS_BACKENDS):
            continue
        found += [f"{name}, {question}" for question in device_questions(path)]
        found += [
            f"{name} imports {module}"
            for module in imports_of(name, path)
            if is_within(module, ("kvd_kernels.cpu", "kvd_kernels.reference", "kvd_kernels.triton"))
        ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        'if device.type == "cuda": pass',
        'if str(ops.device).startswith(("cuda", "gpu")): pass',
        'if ops.name in ("triton", "cpu"): pass',
        "if pool.is_cuda: pass",
        "import torch\ntorch.cuda.synchronize()",
        'match ops.name:\n    case "triton": pass',
        'pin = device != "cpu"',
    ],
)
def test_a_question_about_the_device_is_found_in_every_form(code: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(code)
    assert list(device_questions(path))


# --------------------------------------------------------------------------- what a process really loads


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter; what it prints to stderr becomes the failure."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def names_in(*rooms: str, without: tuple[str, ...] = ()) -> list[str]:
    return [name for name, _ in modules() if is_within(name, rooms) and name not in without]


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (("kvd.scheduler", "kvd.cache", "kvd.observe"), ("torch", "numpy", "aiohttp", "textual")),
        (("kvd.tui",), ("torch", "numpy", "aiohttp")),
        (("kvd.server", "kvd.text"), ("torch", "textual", "transformers")),
        (("kvd.cli", "kvd.log", "kvd.core", "kvd.errors"), ("torch", "numpy", "msgspec", "yaml", "aiohttp", "textual")),
        (("kvd.config", "kvd.config_*"), ("torch", "numpy", "msgspec", "yaml", "aiohttp")),
    ],
)
def test_rooms_load_without(rooms: tuple[str, ...], absent: tuple[str, ...]) -> None:
    names = names_in(*rooms, without=(TENSOR_FILE_OF_CACHE,))
    assert names
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
loaded = [name for name in {absent!r} if name in sys.modules]
assert not loaded, loaded
"""
    run_python(code)


def test_the_numeric_rooms_load_with_torch_triton_and_numpy_alone() -> None:
    """So that they run from a source tree on any machine with a GPU build of torch, nothing installed."""
    names = names_in("kvd.engine", "kvd.scheduler", "kvd.cache", "kvd.model", "kvd_kernels")
    code = f"""
import importlib, importlib.abc, importlib.metadata, re, sys

def closure(names):
    seen, rest = set(), list(names)
    while rest:
        name = re.sub(r"[-_.]+", "-", rest.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        rest += [re.match(r"[A-Za-z0-9._-]+", text).group() for text in required if "extra ==" not in text]
    return seen

allowed = closure({NUMERIC!r})
blocked = {{
    package
    for package, owners in importlib.metadata.packages_distributions().items()
    if package not in ("kvd", "kvd_kernels", "kernels", "tests")
    if not any(re.sub(r"[-_.]+", "-", owner).lower() in allowed for owner in owners)
}}
assert "aiohttp" in blocked and "torch" not in blocked

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        # torch looks for optional packages by itself and does without.
        frame, importer = sys._getframe(), ""
        while frame is not None and not importer:
            module = frame.f_globals.get("__name__", "")
            importer = "" if module.startswith(("importlib", "_frozen", "__main__")) else module
            frame = frame.f_back
        if name.split(".")[0] in blocked and importer.startswith("kvd"):
            raise ImportError(f"{{importer}} needs {{name}}")

sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""
    run_python(code)


def test_the_table_catches_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED, "kvd.engine", LEAVES)
    assert any("imports kvd.scheduler" in line for line in violations())


def test_imports_are_found_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("import a.b as c\nfrom ..d import e\nfrom . import f\ndef g():\n    from h import i\n")
    found = set(imports_of("kvd.room.x", path))
    assert {"a.b", "kvd.d.e", "kvd.room.f", "h.i"} <= found
