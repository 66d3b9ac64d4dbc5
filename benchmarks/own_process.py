"""Measurements in processes of their own, so that earlier ones do not affect them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def in_own_process(module: str, **what: Any) -> Any:
    """Return the result of a benchmark that was started with `--child` and a description of its work."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--child", json.dumps(what)],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
