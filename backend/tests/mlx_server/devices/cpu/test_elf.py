from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from linux import needs_linux
from thorough import ALL

from mlx_manager.mlx_server.devices.cpu import elf
from mlx_manager.mlx_server.devices.cpu.blas import file_of_package

pytestmark = needs_linux("ELF")

BESIDE_A_THREAD_THAT_LOADS_LIBRARIES = """
import _ctypes
import sys
import threading
from pathlib import Path

import mlx.core

from mlx_manager.mlx_server.devices.cpu.elf import imported_slots

done = threading.Event()


def load():
    while not done.is_set():
        _ctypes.dlclose(_ctypes.dlopen(sys.argv[2], 0))


thread = threading.Thread(target=load)
thread.start()
for _ in range(int(sys.argv[3])):
    assert imported_slots(Path(sys.argv[1]), ["free"])
done.set()
thread.join()
"""


@pytest.fixture(scope="module")
def libmlx() -> Path:
    library = file_of_package("mlx", "lib/libmlx.so")
    assert library is not None
    ctypes.CDLL(str(library))
    return library


def test_a_slot_holds_the_address_of_the_function_it_is_named_for(libmlx: Path):
    names = {"__cxa_throw", "__cxa_allocate_exception"}
    slots = elf.imported_slots(libmlx, names)
    assert {slot.name for slot in slots} == names
    for slot in slots:
        function = ctypes.cast(ctypes.CDLL(str(libmlx))[slot.name], ctypes.c_void_p)
        assert ctypes.c_uint64.from_address(slot.address).value == function.value


def test_what_a_library_does_not_import_has_no_slot(libmlx: Path):
    assert elf.imported_slots(libmlx, ["no_such_function"]) == []


def test_slots_are_found_while_another_thread_loads_libraries(libmlx: Path, tmp_path: Path):
    parser = importlib.util.find_spec("httptools.parser.parser")
    assert parser is not None
    assert parser.origin is not None
    other = tmp_path / "never_loaded_before.so"
    shutil.copy(parser.origin, other)
    command = [sys.executable, "-c", BESIDE_A_THREAD_THAT_LOADS_LIBRARIES, str(libmlx), str(other)]
    command.append("200" if ALL else "50")
    subprocess.run(command, check=True, timeout=60)


def test_library_that_is_not_loaded_is_an_error():
    with pytest.raises(FileNotFoundError, match="is not loaded"):
        elf.imported_slots(Path("/nowhere/libx.so"), ["f"])
