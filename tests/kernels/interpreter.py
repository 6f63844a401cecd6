"""Runs the cases of a module in a process where Triton interprets its kernels, which it decides when it is imported.

As a program: `TRITON_INTERPRET=1 python tests/kernels/interpreter.py triton_cases fp32`.
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interpret(cases: str, *arguments: str) -> None:
    """Calls `main` of `tests.kernels.<cases>`; an AssertionError has all that it printed if it fails."""
    pytest.importorskip("triton", reason="Triton is an extra")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    program = [sys.executable, "-W", "ignore", __file__, cases, *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def _patch_once_a_launch() -> None:
    """Triton's interpreter patches its language anew at each call of a device function, a third of all its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, tl.core.is_builtin
    # What is patched is no builtin; functions of the language itself look at `tl.core`, kernels at `tl`.
    interpreter._patch_lang = lambda fn: patch(fn) if is_builtin(tl.load) or is_builtin(tl.core.load) else None


if __name__ == "__main__":
    _patch_once_a_launch()
    import_module(f"tests.kernels.{sys.argv[1]}").main(*sys.argv[2:])
