"""Fetches the official ALFWorld games: downloads that continue where they stopped, checked and unpacked as a whole."""

from __future__ import annotations

import shutil
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import httpx
import tenacity

from agentgym.errors import DataError, InfrastructureError
from agentgym.tasks.alfworld.official import (
    OFFICIAL_COUNTS,
    POINTER_FILE,
    ROOT_NAME,
    FolderTasks,
    load_official,
    official_root,
)

_RELEASES = "https://github.com/alfworld/alfworld/releases/download"
URLS = (
    f"{_RELEASES}/0.2.2/json_2.1.1_json.zip",
    f"{_RELEASES}/0.2.2/json_2.1.1_pddl.zip",
    f"{_RELEASES}/0.4.0/json_2.1.2_tw-pddl.zip",
)
"""Trajectories, problems, and games in the wording since 0.4.0: what alfworld 0.4.2 downloads."""

Progress = Callable[[str, int, int | None], None]

_ATTEMPTS = 6
_ELSEWHERE = "If you have the data already, use `agentgym data fetch alfworld --from DIR`."


def fetch(
    target: Path,
    *,
    source_dir: Path | None = None,
    progress: Progress | None = None,
    urls: Sequence[str] = URLS,
    expected: Mapping[str, int] = OFFICIAL_COUNTS,
    wait: float = 1.0,
) -> str:
    """Puts the official games into a folder, or notes where they already are.

    Args:
        target: folder to keep them in.
        source_dir: existing folder with the official data; nothing is copied or downloaded then.
        progress: called with (label, bytes done, bytes in all or None).
        urls: zip files, unpacked over each other in this order.
        expected: number of games of each split.
        wait: seconds before the first retry; doubles each time.

    Returns:
        A sentence for people about what is there now.

    Raises:
        DataError: if an archive or the data is not what it should be.
        InfrastructureError: if the network or the disk fails; calling again continues.
    """
    if source_dir is not None:
        source = source_dir.expanduser().resolve()
        tasks = load_official(source, expected)
        target.mkdir(parents=True, exist_ok=True)
        (target / POINTER_FILE).write_text(f"{source}\n", encoding="utf-8")
        return _summary(tasks, source)
    final = target / ROOT_NAME
    if not final.exists():
        downloads = target / "downloads"
        archives = [download(url, downloads, progress=progress, wait=wait) for url in urls]
        _unpack_all(archives, target / "unpacking", final)
        shutil.rmtree(downloads, ignore_errors=True)
    try:
        tasks = load_official(target, expected)
    except DataError as error:
        raise DataError(error.path, error.problem, f"Delete {final} and fetch again. {_ELSEWHERE}") from error
    (target / POINTER_FILE).unlink(missing_ok=True)
    return _summary(tasks, final)


def _summary(tasks: FolderTasks, place: Path) -> str:
    counts = ", ".join(f"{split} {count}" for split, count in sorted(tasks.splits.items()))
    return f"Official ALFWorld games in {place}: {counts}. Play them with --tasks alfworld/official."


def download(url: str, folder: Path, *, progress: Progress | None = None, wait: float = 1.0) -> Path:
    """Downloads a file, continuing an earlier try if the server still has the same content.

    Args:
        url: what to download; the last part of its path names the file.
        folder: where to keep it.
        progress: called with (file name, bytes done, bytes in all or None).
        wait: seconds before the first retry; doubles each time.

    Returns:
        The complete file.

    Raises:
        DataError: if the server does not have or give the file.
        InfrastructureError: if the connection keeps failing or the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / httpx.URL(url).path.rsplit("/", 1)[-1]
    if path.exists():
        return path
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((httpx.TransportError, _TryAgainError)),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=wait, max=30 * wait),
        reraise=True,
    )
    try:
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            retrying(_transfer, client, url, path, progress)
    except (httpx.HTTPError, _TryAgainError) as error:
        raise InfrastructureError(
            f"{url} could not be downloaded ({error or type(error).__name__}). "
            f"Try again later: what has arrived is kept. {_ELSEWHERE}"
        ) from error
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be written ({error}). Free some space, or use --to DIR.") from error
    return path


class _TryAgainError(Exception):
    """The server's answer may be better next time."""


def _transfer(client: httpx.Client, url: str, path: Path, progress: Progress | None) -> None:
    """One try; what arrives stays in a .part file beside a note of the content's ETag."""
    part, tag = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.etag")
    done = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={done}-"} if done else {}
    if done and tag.exists():
        headers["If-Range"] = tag.read_text(encoding="utf-8")
    with client.stream("GET", url, headers=headers | {"Accept-Encoding": "identity"}) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)  # longer than the file is now: it is another file
            raise _TryAgainError("the partial download does not fit the file on the server")
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _TryAgainError(f"status {response.status_code}")
        if response.status_code >= 400:
            problem = f"the server answers {response.status_code} {response.reason_phrase}"
            raise DataError(url, problem, f"Look for a newer version of agentgym. {_ELSEWHERE}")
        continued = response.status_code == httpx.codes.PARTIAL_CONTENT and done
        if continued and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink(missing_ok=True)
            raise _TryAgainError("the server continued at another place than asked")
        done = done if continued else 0
        etag = response.headers.get("ETag", "")
        if etag and not etag.startswith("W/"):
            tag.write_text(etag, encoding="utf-8")
        else:
            tag.unlink(missing_ok=True)
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if continued else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(path.name, done, total)
    tag.unlink(missing_ok=True)
    part.replace(path)


def _unpack_all(archives: Sequence[Path], staging: Path, final: Path) -> None:
    """Unpacks archives over each other and moves the result into place in one step."""
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for archive in archives:
            unpack(archive, staging)
        root = official_root(staging)
        if root is None:
            raise DataError(archives[-1], "the archives hold no train, valid_seen and valid_unseen", _ELSEWHERE)
        root.replace(final)
    except OSError as error:
        raise InfrastructureError(
            f"{staging} cannot be written ({error}). Free some space, or use --to DIR; the downloads are kept."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip file after checking it: checksums, and that every member stays inside the folder.

    Raises:
        DataError: if it is damaged, or has a member that is a link or leads outside. A damaged archive is deleted, so
            that fetching again downloads it anew.
        InfrastructureError: if the disk has no room for it.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            members = content.infolist()
            for member in members:
                _check_member(archive, member)
            damaged = content.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            folder.mkdir(parents=True, exist_ok=True)
            needed, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
            if needed > free:
                raise InfrastructureError(
                    f"{folder} has {free >> 20} MB free and {archive.name} needs {needed >> 20}. "
                    "Free some space, or use --to DIR; the downloads are kept."
                )
            content.extractall(folder)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        archive.unlink(missing_ok=True)
        mend = "It was deleted: run the same command again to download it anew."
        raise DataError(archive, f"the archive is damaged ({error})", mend) from error


def _check_member(archive: Path, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename.replace("\\", "/"))
    linked = stat.S_ISLNK(member.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or ":" in member.filename or linked:
        raise DataError(
            archive,
            f"its member {member.filename!r} leads outside the folder or is a link",
            "Do not use this archive; download it from the project's release page.",
        )
