"""Program that has writers of one folder killed at random moments, and looks at what they leave.

    killed_writers.py FOLDER KILLS

After each kill every file under a block's name must be whole, and all files together must take no
more than the budget and one file. Prints how many blocks were found at the end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.names import DIGEST, FILE, PLAIN, BlockName, Space

BUDGET = 1_000_000
LARGEST = 130_000
SPACES = [Space(f"owner/model-{i}", {"revision": i}) for i in range(2)]


def write_for_ever(limits: PrefixDisk, seed: int) -> None:
    folder, random_ = Folder(limits), random.Random(seed)
    folder.look()
    while True:
        space = random_.choice(SPACES)
        first = 16 * random_.randrange(20)
        name = BlockName(random_.randbytes(DIGEST), PLAIN, first, first + 16)
        data = np.frombuffer(random_.randbytes(random_.randrange(1000, LARGEST - 2000)), np.uint8)
        block = PrefixBlock(name, {"keys.0": Tensor("uint8", data.shape, data)})
        header = blocks.header_of(space, block)
        write = partial(blocks.write, header=header, block=block)
        folder.add(space, name, len(header) + block.nbytes, write)


def look(limits: PrefixDisk) -> int:
    """Return the number of blocks after a kill; every one of them must be whole."""
    root = Folder(limits).root
    everything = [path for path in root.rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in everything if path.parent != root)
    assert taken <= BUDGET + LARGEST, f"{taken} bytes"
    folder = Folder(limits)
    folder.look()
    found = 0
    for space in SPACES:
        for path in (folder.root / space.folder).glob("*"):
            assert not path.name.startswith("."), f"{path} is left"
            if named := FILE.fullmatch(path.name):
                header = path.open("rb").read(4096)
                start = header.index(b'"pages": "') + 10
                first, _, end = header[start : header.index(b'"', start)].partition(b":")
                name = BlockName(bytes.fromhex(named[1]), named[2], int(first), int(end))
                blocks.read(path, space, name)
                assert folder.has(space, name)
                found += 1
    return found


def main(folder: Path, kills: int) -> None:
    limits = PrefixDisk(folder, BUDGET)
    found = 0
    for number in range(kills):
        writers = []
        for writer in range(2):
            if not (child := os.fork()):
                write_for_ever(limits, 2 * number + writer)
            writers.append(child)
        time.sleep(0.002 + 0.03 * random.Random(number).random())
        for child in writers:
            os.kill(child, signal.SIGKILL)
        for child in writers:
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "a writer failed by itself"
        found = look(limits)
    print(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
