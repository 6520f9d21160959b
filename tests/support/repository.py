"""A git repository of a test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(directory: Path, *arguments: str) -> None:
    """Runs git in the directory, as an author who needs no configuration."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)
