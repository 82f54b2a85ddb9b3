"""The widget managers of other front ends, as their makers publish them on npm."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

STORE = Path(__file__).parents[2] / "build" / "frontends"
WAIT_S = 120


class FetchError(RuntimeError):
    """There is no npm here, or it cannot fetch a package."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One script out of a package, with the checksum that npm gives for the package."""

    package: str
    version: str
    script: str
    sha512: str

    def text(self) -> str:
        """Return the script; it is fetched once and kept under ``build``.

        Raises:
            FetchError: there is no npm, or it cannot fetch the package.
            ValueError: what came is not what was published.
        """
        kept = STORE / f"{self.package.rpartition('/')[2]}-{self.version}.js"
        if not kept.exists():
            STORE.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(self._fetched())
            part.replace(kept)
        return kept.read_text(encoding="utf-8")

    def _fetched(self) -> bytes:
        """Return the script out of the package that npm fetches from where it is told to."""
        name = f"{self.package}@{self.version}"
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", name, "--pack-destination", folder]
            try:
                subprocess.run(command, cwd=folder, capture_output=True, timeout=WAIT_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or b""
                raise FetchError(f"{error}\n{said.decode(errors='replace')[-1000:]}") from error
            (file,) = Path(folder).glob("*.tgz")
            found = base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()
            if found != self.sha512:
                raise ValueError(f"{name} has the checksum {found}, not {self.sha512}")
            with tarfile.open(file) as archive:
                member = archive.extractfile(f"package/{self.script}")
                assert member is not None
                return member.read()


VSCODE = Bundle(
    package="@vscode/jupyter-ipywidgets8",
    version="1.0.9",
    script="dist/ipywidgets.js",
    sha512="bocCThfa4JDIDd7qCFAfW3HpzHfTLYxOTpTbiDfw4DXOUjKHnr6ObkMBiIkuzYPRybh5bY4FhYLemuDuTvIbpQ==",
)
"""What VS Code's Jupyter extension brings along."""

PLAIN = Bundle(
    package="@jupyter-widgets/html-manager",
    version="1.0.15",
    script="dist/embed.js",
    sha512="5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
)
"""What web pages use; the managers of hosted notebooks are built on it."""
