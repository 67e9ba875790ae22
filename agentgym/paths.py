"""Where official data is kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def data_dir() -> Path:
    """`$AGENTGYM_DATA`, else the user's cache folder (XDG)."""
    chosen = os.environ.get("AGENTGYM_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "agentgym"
