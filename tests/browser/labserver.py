"""A real JupyterLab on the loopback interface, in a directory of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_client import BlockingKernelClient

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
HOME = ".home"
START_S = 180
ANSWER_S = 60


class Lab:
    """A running server: its address, its token and the directory that it serves."""

    def __init__(self, url: str, token: str, directory: Path) -> None:
        self.url = url
        self.token = token
        self.directory = directory

    def notebook(self, name: str) -> str:
        """Return the address of a notebook in a workspace that nothing else uses."""
        space = secrets.token_hex(4)
        return f"{self.url}/lab/workspaces/{space}/tree/{name}?token={self.token}"

    def classic(self, name: str) -> str:
        """Return the address of a notebook in Notebook 7, which the same server offers."""
        return f"{self.url}/notebooks/{name}?token={self.token}"

    def get(self, path: str) -> object:
        """Ask the server's own interface."""
        return json.loads(self._call("GET", path))

    def start_kernel(self, name: str) -> None:
        """Start the kernel of a notebook, or find the running one, and wait until it answers.

        The server drops a page's first connection to a kernel that takes long to start, and
        JupyterLab then shows no widget of anybody's.
        """
        wish = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        session = json.loads(self._call("POST", "/api/sessions", json.dumps(wish).encode()))
        file = self.directory / HOME / "runtime" / f"kernel-{session['kernel']['id']}.json"
        deadline = time.monotonic() + START_S
        # The client takes a kernel that does not beat yet for a dead one: it is asked again.
        while not _answers(file) and time.monotonic() < deadline:
            time.sleep(0.2)

    def use_theme(self, name: str) -> None:
        """Choose the theme of every page that is opened from now on."""
        self._set("@jupyterlab/apputils-extension:themes", {"theme": name})
        self._set("@jupyterlab/apputils-extension:notification", {"fetchNews": "false"})

    def save_widgets(self, wish: bool) -> None:
        """Choose whether notebooks are saved with the state of their widgets."""
        self._set("@jupyter-widgets/jupyterlab-manager:plugin", {"saveState": wish})

    def _set(self, name: str, values: dict[str, object]) -> None:
        body = json.dumps({"raw": json.dumps(values)}).encode()
        self._call("PUT", f"/lab/api/settings/{name}", body)

    def stop_kernels(self) -> None:
        """Shut every session down, as closing the laptop would."""
        self.stop_kernel("")

    def stop_kernel(self, name: str) -> None:
        """Shut down the kernel of one notebook, or of all when none is named."""
        for session in json.loads(self._call("GET", "/api/sessions")):
            if name in session["path"]:
                self._call("DELETE", f"/api/sessions/{session['id']}")

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers, data=body)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return bytes(reply.read())


@contextmanager
def running_lab(directory: Path) -> Iterator[Lab]:
    """Start JupyterLab over ``directory`` and stop it at the end, kernels included."""
    port, token = _free_port(), secrets.token_hex(16)
    home = directory / HOME
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "OMP_NUM_THREADS": "1",
        "CUDALENS_WIDGETS": "",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}"]
    command += ["--ip=127.0.0.1", f"--IdentityProvider.token={token}", "--allow-root"]
    command += [
        "--ServerApp.port_retries=0",
        "--LabApp.news_url=",
        "--LabApp.extension_manager=readonly",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        lab = Lab(f"http://127.0.0.1:{port}", token, directory)
        try:
            _wait_until_it_answers(lab, server)
            yield lab
            lab.stop_kernels()
        finally:
            server.terminate()
            try:
                server.wait(timeout=ANSWER_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(lab: Lab, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            lab.get("/api/status")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    log = (lab.directory / "server.log").read_text(errors="replace")
    raise RuntimeError(f"JupyterLab did not start:\n{log[-3000:]}")


def _answers(connection_file: Path) -> bool:
    """Whether the kernel of a connection file answers what it is."""
    client = BlockingKernelClient(connection_file=str(connection_file))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=START_S)
    except RuntimeError:
        return False
    finally:
        client.stop_channels()
    return True
