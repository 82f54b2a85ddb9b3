"""Windows: guards and reports work without what only POSIX has; the rehearsal device refuses."""

from __future__ import annotations

import sys

from tests.processes import python

AS_ON_WINDOWS = """
import os, sys, sysconfig
import IPython, ipywidgets, matplotlib.font_manager, torch, torch.utils.data
sysconfig.get_config_vars()
sys.platform = "win32"
for name in ("termios", "fcntl", "resource", "pty", "tty", "pwd", "grp"):
    sys.modules[name] = None
for name in ("memfd_create", "register_at_fork", "openpty", "fork", "mkfifo"):
    delattr(os, name)
os.environ["PATH"] = ""  # no tee
"""
PROGRAM = """
import importlib, pkgutil
import torch
import cudalens

for module in pkgutil.walk_packages(cudalens.__path__, "cudalens."):
    # Integrations import what is not ours, which asks for the platform as well.
    if not module.name.endswith("__main__") and ".integrations." not in module.name:
        importlib.import_module(module.name)
with cudalens.check():
    torch.ones(2).sum()
try:
    with cudalens.check() as session:
        torch.ones(2) @ torch.ones(3)
except RuntimeError:
    print(session.report.headline_schema)
    print(*session.report.limits)
with cudalens.check(deferred=True):
    torch.ones(2).sum()
try:
    cudalens.simulate()
except cudalens.simulate.SimulationError as error:
    print(error)
"""


def test_on_windows_guards_and_reports_work_and_the_rehearsal_device_names_wsl() -> None:
    done = python("-c", PROGRAM if sys.platform == "win32" else AS_ON_WINDOWS + PROGRAM)
    assert done.returncode == 0, done.stderr
    headline, limits, refusal = done.stdout.splitlines()
    assert "2" in headline and "3" in headline
    assert "this system has no tee program" in limits
    assert refusal == "The rehearsal device needs Linux or macOS: on Windows, use WSL 2."
