"""The files of the project, for tests that read them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def native_files() -> list[Path]:
    return sorted(p for p in (ROOT / "cc").rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
