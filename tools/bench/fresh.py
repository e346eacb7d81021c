"""Run one function of the benchmark in a fresh process and bring its result back as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def call(function: Callable[..., Any], settings: Settings, **arguments: Any) -> Any:
    """Call ``function(settings, **arguments)`` in a fresh Python process.

    Args:
        function: A module-level function of the benchmark; its result must be JSON.
        settings: Passed first.
        **arguments: Plain values, passed by name.

    Returns:
        What the function returned.

    Raises:
        RuntimeError: The process failed; its error output has been shown.
    """
    result = settings.path(f"result-{os.getpid()}.json")
    request = {
        "module": function.__module__,
        "name": function.__name__,
        "settings": settings.to_json(),
        "arguments": arguments,
        "result": str(result),
    }
    cache = settings.path("cache")
    cache.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.fresh", json.dumps(request)],
        cwd=ROOT,
        env={**os.environ, "CASNAP_CACHE_DIR": str(cache)},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{function.__module__}.{function.__name__} failed in its own process")
    answer = json.loads(result.read_text())
    result.unlink()
    return answer


def main(request: dict[str, Any]) -> None:
    """Serve one call: import, run, write the result."""
    warnings.simplefilter("ignore")
    function = getattr(importlib.import_module(request["module"]), request["name"])
    answer = function(Settings(**request["settings"]), **request["arguments"])
    Path(request["result"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
