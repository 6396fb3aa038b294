"""One file with the blocks of a model, for another machine that serves the same model.

The file is a tar of plain members, `prefixes.json` first: the model, the facts of each form, and
all blocks with their names and sizes. The blocks follow in that order, those used least recently
first, each as it lies on disk. Nothing is unpacked by the names in the file: they are only compared
with those that follow from the facts.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import MOST_PAGES, Damaged
from mlx_manager.mlx_server.engine.disk.folder import Folder, WriteRefused
from mlx_manager.mlx_server.engine.disk.names import DIGEST, FORMAT, KINDS, BlockName, Space

KIND = "mlx-manager kept prefixes"
VERSION = 1
MANIFEST = "prefixes.json"
LARGEST_MANIFEST = 1 << 28
LARGEST_BLOCK = 1 << 32
LONGEST_MODEL = 1024
DEEPEST_FACTS = 8
FOREIGN = "it was not written by `mlx-manager cache export`"


class ArchiveRefused(Exception):
    """Error: a file is not an archive of kept prefixes that can be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A block in an archive. nbytes: of its file."""

    space: Space
    name: BlockName
    nbytes: int

    @property
    def member(self) -> str:
        """Return its name in the tar."""
        return f"{self.space.digest.hex()}/{self.name.file}"


@dataclass(slots=True)
class Moved:
    """Account of an export or import.

    blocks, nbytes: that were moved. there: blocks that were in the folder already. damaged: blocks
    that were left out as they were not whole. gone: blocks that were removed while they were to be
    exported. unfit: blocks for which there was no room. stopped: why no more were written.
    """

    blocks: int = 0
    nbytes: int = 0
    there: int = 0
    damaged: int = 0
    gone: int = 0
    unfit: int = 0
    stopped: str = ""


# -- export ------------------------------------------------------------------------------------


def export(folder: Folder, model: str, file: BinaryIO) -> Moved:
    """Write all whole blocks of a model into an empty file.

    file: can be sought in.

    Raises:
        OSError: a file can't be read or written.
    """
    moved = Moved()
    planned = _kept(folder, model, moved)
    # The list stands in front, and is written last, without the blocks that were not whole.
    reserved = len(_manifest(model, planned))
    file.write(_header(MANIFEST, reserved))
    _fill(file, reserved)
    written = []
    for entry in planned:
        try:
            block = blocks.read(folder.path(entry.space, entry.name), entry.space, entry.name)
        except FileNotFoundError:
            moved.gone += 1
            continue
        except Damaged:
            moved.damaged += 1
            continue
        header = blocks.header_of(entry.space, block)
        if (nbytes := len(header) + block.nbytes) != entry.nbytes:
            moved.damaged += 1
            continue
        file.write(_header(entry.member, nbytes))
        blocks.write(file, header, block)
        file.write(bytes(-nbytes % tarfile.BLOCKSIZE))
        written.append(entry)
    file.write(bytes(2 * tarfile.BLOCKSIZE))
    file.seek(tarfile.BLOCKSIZE)
    file.write(_manifest(model, written).ljust(reserved))
    moved.blocks, moved.nbytes = len(written), sum(entry.nbytes for entry in written)
    return moved


def _kept(folder: Folder, model: str, moved: Moved) -> list[Entry]:
    """Return a model's blocks, those used least recently first."""
    found = []
    for form in folder.kept():
        if form.model != model:
            continue
        space = folder.space(form.folder)
        if space is None:
            moved.damaged += form.files
            continue
        for file, of in folder.files(space).items():
            try:
                name = blocks.name_of(folder.root / form.folder / file)
            except FileNotFoundError:
                moved.gone += 1
            except Damaged:
                moved.damaged += 1
            else:
                found.append((of.used, Entry(space, name, of.nbytes)))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def _manifest(model: str, entries: Iterable[Entry]) -> bytes:
    spaces: dict[bytes, Space] = {}
    listed = []
    for entry in entries:
        spaces[entry.space.digest] = entry.space
        name = entry.name
        listed.append(
            {
                "space": entry.space.digest.hex(),
                "digest": name.digest.hex(),
                "kind": name.kind,
                "pages": [name.first, name.end],
                "bytes": entry.nbytes,
            }
        )
    content = {
        "kind": KIND,
        "version": VERSION,
        "blocks_version": FORMAT,
        "model": model,
        "forms": {digest.hex(): space.facts for digest, space in spaces.items()},
        "blocks": listed,
    }
    return json.dumps(content).encode()


def _header(name: str, nbytes: int) -> bytes:
    """Return what a plain member begins with."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = nbytes, 0o600
    return member.tobuf(tarfile.USTAR_FORMAT)


def _fill(file: BinaryIO, nbytes: int) -> None:
    """Leave room for a member's content, up to whole blocks of tar."""
    file.write(b" " * nbytes + bytes(-nbytes % tarfile.BLOCKSIZE))


# -- import ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Archive:
    """An archive whose list and members have been checked; the content of blocks has not.

    model: its id. spaces: the forms in it. entries: the blocks, those used least recently first,
    each with the place of its content in the file.
    """

    file: BinaryIO
    model: str
    spaces: list[Space]
    entries: list[tuple[Entry, int]] = field(default_factory=list)

    @classmethod
    def read(cls, file: BinaryIO) -> Archive:
        """Return the archive in a file, which can be sought in.

        Raises:
            ArchiveRefused: it is damaged, cut off, of another version, or something else.
            OSError: it can't be read.
        """
        name, nbytes = _next_member(file)
        if name != MANIFEST:
            raise ArchiveRefused(f"{FOREIGN}: it does not begin with {MANIFEST}")
        if nbytes > LARGEST_MANIFEST:
            raise ArchiveRefused(f"its {MANIFEST} is too large")
        model, spaces, entries = _listed(file.read(nbytes))
        end = file.seek(0, io.SEEK_END)
        place = tarfile.BLOCKSIZE + _whole(nbytes)
        found = cls(file, model, spaces)
        for entry in entries:
            file.seek(place)
            if _next_member(file) != (entry.member, entry.nbytes):
                raise ArchiveRefused(f"its members are not those that its {MANIFEST} lists")
            begin = place + tarfile.BLOCKSIZE
            place = begin + _whole(entry.nbytes)
            if place > end:
                raise ArchiveRefused("it is cut off")
            found.entries.append((entry, begin))
        file.seek(place)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ArchiveRefused(f"it has more members than its {MANIFEST} lists, or is cut off")
        return found

    def move_into(self, folder: Folder, usable: Callable[[Space], bool]) -> Moved:
        """Add the blocks of usable forms to a folder that has been looked at. Of more than it has
        room for, those used last are taken.

        Raises:
            OSError: a file can't be read or written.
        """
        moved, chosen = Moved(), deque[tuple[Entry, int]]()
        room = folder.room()
        for entry, place in reversed(self.entries):
            if not usable(entry.space):
                continue
            if folder.has(entry.space, entry.name):
                moved.there += 1
            elif entry.nbytes > room:
                # Nor are older ones taken, though they be smaller.
                room = 0
                moved.unfit += 1
            else:
                room -= entry.nbytes
                chosen.appendleft((entry, place))
        for number, (entry, place) in enumerate(chosen):
            try:
                self._move(folder, entry, place)
            except Damaged:
                moved.damaged += 1
            except WriteRefused as error:
                moved.unfit += len(chosen) - number
                moved.stopped = str(error)
                break
            else:
                moved.blocks += 1
                moved.nbytes += entry.nbytes
        return moved

    def _move(self, folder: Folder, entry: Entry, place: int) -> None:
        space, name = entry.space, entry.name
        self.file.seek(place)
        block = blocks.read_part(self.file, entry.nbytes, space, name)
        header = blocks.header_of(space, block)
        nbytes = len(header) + block.nbytes
        folder.add(space, name, nbytes, partial(blocks.write, header=header, block=block))


def _whole(nbytes: int) -> int:
    """Return the bytes that content of so many takes in a tar."""
    return nbytes + -nbytes % tarfile.BLOCKSIZE


def _next_member(file: BinaryIO) -> tuple[str, int]:
    """Return the name and size of the plain member that begins here."""
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "strict")
    except (tarfile.HeaderError, ValueError):
        raise ArchiveRefused(f"it is cut off or damaged, or {FOREIGN}") from None
    if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE} or member.size < 0:
        raise ArchiveRefused(f"{FOREIGN}: {member.name} in it is no plain file")
    return member.name, member.size


def _listed(text: bytes) -> tuple[str, list[Space], list[Entry]]:
    """Return the model, the forms and the blocks that the list of an archive has."""
    try:
        content = json.loads(text)
        if content["kind"] != KIND:
            raise ArchiveRefused(FOREIGN)
        versions = content["version"], content["blocks_version"]
        if versions != (VERSION, FORMAT):
            raise ArchiveRefused(
                f"its format is {versions[0]}, with blocks of format {versions[1]}; this program "
                f"reads format {VERSION} with blocks of format {FORMAT}"
            )
        model = content["model"]
        if not isinstance(model, str) or not 0 < len(model) <= LONGEST_MODEL:
            raise ArchiveRefused(f"its {MANIFEST} names no model")
        spaces = {digest: _form(model, digest, of) for digest, of in content["forms"].items()}
        entries = [_entry(spaces[of["space"]], of) for of in content["blocks"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArchiveRefused(f"its {MANIFEST} can't be read") from None
    if len({entry.member for entry in entries}) < len(entries):
        raise ArchiveRefused(f"its {MANIFEST} lists a block twice")
    return model, list(spaces.values()), entries


def _form(model: str, digest: str, facts: Any) -> Space:
    if not isinstance(facts, dict) or not _is_shallow(facts, DEEPEST_FACTS):
        raise ValueError
    space = Space(model, facts)
    if space.digest.hex() != digest:
        raise ArchiveRefused(f"its {MANIFEST} has a form under another's name")
    return space


def _is_shallow(value: Any, most: int) -> bool:
    """Return whether JSON is nested at most so deep."""
    match value:
        case dict():
            inner = list(value.values())
        case list():
            inner = value
        case _:
            return True
    return most > 0 and all(_is_shallow(one, most - 1) for one in inner)


def _entry(space: Space, of: dict[str, Any]) -> Entry:
    first, end = of["pages"]
    nbytes, digest = of["bytes"], of["digest"]
    if not type(first) is type(end) is type(nbytes) is int or of["kind"] not in KINDS:
        raise ValueError
    if not (0 <= first < end <= MOST_PAGES and 0 < nbytes <= LARGEST_BLOCK):
        raise ValueError
    name = BlockName(bytes.fromhex(digest), of["kind"], first, end)
    if len(name.digest) != DIGEST or name.digest.hex() != digest:
        raise ValueError
    return Entry(space, name, nbytes)
