"""Writes the files that are generated from the program: kvd.yaml, docs/configuration.md, docs/cli.md."""

from __future__ import annotations

from pathlib import Path

from kvd.cli import all_help
from kvd.config_docs import generated_files


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    for path, content in generated_files(root, all_help()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")


if __name__ == "__main__":
    main()
