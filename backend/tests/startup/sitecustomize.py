"""What every Python that a test starts does first, where several processes run the tests.

`transformers` looks for the names of its classes in a thousand files, twice, at every import: a
quarter of what it takes a server to start. Here the first that imports it leaves what it found
beside this file, of which each run has a copy, and the others read it there.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        look: Any = module.define_import_structure  # type: ignore[attr-defined]

        def found(module_path: str | Path, prefix: str | None = None) -> Any:
            kept = Path(__file__).with_name(f"{'-'.join(Path(module_path).parts[-3:])}.{prefix}")
            if not kept.exists():
                new = kept.with_name(f"{kept.name}.{os.getpid()}")
                new.write_bytes(pickle.dumps(look(module_path, prefix)))
                new.replace(kept)
            return pickle.loads(kept.read_bytes())

        module.define_import_structure = found  # type: ignore[attr-defined]


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder)
