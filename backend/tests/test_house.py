"""The rules of the house: who may import whom, how long a function may be, what the README says."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from pathlib import Path

from mlx_manager import configuration
from mlx_manager.mlx_server.settings import TABLE

BACKEND = Path(__file__).parent.parent
SERVER = BACKEND / "mlx_manager" / "mlx_server"
PATHS = {path.relative_to(SERVER).as_posix(): path for path in sorted(SERVER.rglob("*.py"))}

LEAVES = {
    *("address", "core", "errors", "config", "limits", "settings", "timeline", "defaults"),
}
FOUNDATION = LEAVES | {"formats", "utils"}
MAY_IMPORT = {
    "address": set(),
    "core": set(),
    "errors": set(),
    "config": {"address", "settings"},
    "limits": set(),
    "settings": set(),
    "timeline": {"core"},
    "defaults": {"core"},
    "formats": set(),
    "utils": LEAVES,
    "observability": LEAVES,
    "schemas": LEAVES,
    "images": FOUNDATION,
    "protocols": LEAVES | {"images", "schemas"},
    "stream": LEAVES,
    "memory": FOUNDATION | {"devices"},
    "devices": FOUNDATION | {"memory"},
    "kv": FOUNDATION | {"devices"},
    "sampling": FOUNDATION | {"devices"},
    "families": FOUNDATION,
    "pictures": FOUNDATION | {"devices"},
    "vision": FOUNDATION | {"devices", "pictures"},
    "execution": FOUNDATION | {"devices", "families", "kv", "pictures", "sampling"},
    "text": FOUNDATION,
    "engine": FOUNDATION
    | {*("devices", "execution", "kv", "memory", "pictures", "sampling", "stream", "text")},
    "models": FOUNDATION | {"devices", "families", "memory", "text", "vision"},
    "encoders": FOUNDATION | {"devices", "engine", "memory", "models"},
    "backends": FOUNDATION
    | {*("encoders", "engine", "execution", "memory", "models", "pictures", "sampling", "stream")}
    | {*("text", "vision")},
    "inside": FOUNDATION
    | {*("backends", "devices", "encoders", "engine", "execution", "memory", "models")}
    | {*("observability", "stream", "text", "workers")},
    "workers": FOUNDATION | {"models", "stream"},
    "remotes": FOUNDATION | {"images"},
    "pool": FOUNDATION | {"models", "remotes", "workers"},
    # Its two doors for scripts (`generate_chat_completion`) take and give wire types.
    "services": FOUNDATION
    | {*("images", "models", "observability", "pool", "protocols", "schemas", "stream")},
    "api": LEAVES | {"images", "services", "protocols", "schemas", "observability", "stream"},
}
"""Besides itself; `main` composes and may import all. Nobody imports `api` or `main`."""
ROOMS = {
    **{f"workers/{name}.py": "inside" for name in ("host", "memory", "model", "rows")},
    **{
        f"workers/{name}.py": "inside"
        for name in ("hosts", "program", "rank", "rank_messages", "ranks", "share")
    },
    **{
        f"models/{name}.py": "pool"
        for name in ("grants", "loads", "policy", "pool", "residents", "status")
    },
    **{
        path: "families"
        for path in PATHS
        if path.startswith("models/families/")
        or path in {"models/family.py", "models/module_facts.py"}
    },
    "engine/stream.py": "stream",
    **{
        f"engine/kv/{name}.py": "kv"
        for name in ("__init__", "coded", "contents", "pages", "prefix", "store")
    },
    "engine/sampling.py": "sampling",
    "engine/prompt_images.py": "pictures",
    "execution/images.py": "pictures",
    "utils/memory.py": "memory",
}
"""Modules in rooms of their own: what runs in a worker's process, what has workers, what both hand
events on by, what is declared of families, and what pictures in prompts and steps are."""

MLX_ROOMS = (
    *("devices/", "encoders/", "engine/", "execution/", "models/", "text/", "vision/"),
    "utils/memory.py",
)
WITHOUT_MLX = {path for path, its in ROOMS.items() if its in {"families", "pool", "stream"}} | {
    *("models/catalog.py", "models/facts.py", "models/modalities.py", "models/settings.py"),
}
"""Modules in these rooms that the server's own process imports."""
FASTAPI_ROOMS = ("api/", "main.py")
CATCH_ALL = ("api/errors.py", "engine/thread.py", "workers/host.py")
LONGEST_FUNCTION = 60
RIDDLES = re.compile(
    r"\s*(What|Whether|Of|How|Who|Where|By|Whose|Which|When|That|It|Its|They|There)\b"
)
"""Openings of sentences that do not say what a thing is or does."""


def imports(tree: ast.Module) -> Iterator[str]:
    """Every name that a module imports, inside functions too, save those for type checkers."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                continue
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


@cache
def trees() -> dict[str, ast.Module]:
    """Seconds, which a process that runs other files' tests has no use for."""
    return {name: ast.parse(path.read_text()) for name, path in PATHS.items()}


def room(path: str) -> str:
    return ROOMS.get(path) or path.split("/", maxsplit=1)[0].removesuffix(".py")


def room_of(module: str) -> str:
    """Return the room of what is imported by that name within the package."""
    parts = module.split(".")
    paths = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    names = (path + end for path in paths for end in (".py", "/__init__.py"))
    return next((room(path) for path in names if path in PATHS), parts[0])


def test_imports_point_one_way() -> None:
    prefix = "mlx_manager.mlx_server."
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        for name in imports(tree)
        if name.startswith(prefix) and room(path) not in {"main", "__init__"}
        if room_of(name.removeprefix(prefix)) not in MAY_IMPORT[room(path)] | {room(path)}
    ]
    assert not wrong


def at_import(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run as a module does."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.If(test) if not ast.unparse(test).endswith("TYPE_CHECKING"):
                yield from at_import([*node.body, *node.orelse])
            case ast.Try():
                yield from at_import([*node.body, *node.orelse])


def packages_of(module: str) -> set[str]:
    return set(accumulate(module.split(".")[:-1], "{}.{}".format))


def test_every_module_can_be_the_first_that_is_imported() -> None:
    modules = {
        "mlx_manager.mlx_server." + path.removesuffix(".py").replace("/", "."): tree
        for path, tree in trees().items()
    }
    modules = {name.removesuffix(".__init__"): tree for name, tree in modules.items()}
    needs: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = {name for node in at_import(tree.body) for name in imports(ast.Module([node], []))}
        found = {name if name in modules else name.rpartition(".")[0] for name in named}
        around = {package for name in found for package in packages_of(name)}
        needs[module] = ((found | around) & modules.keys()) - packages_of(module) - {module}
        needs[module] |= found & packages_of(module) & modules.keys()
    TopologicalSorter(needs).prepare()


def test_a_public_class_has_a_name_of_its_own() -> None:
    """Wire types are named as the protocols name them, and layers as their checkpoints do."""
    named = Counter(
        node.name
        for path, tree in trees().items()
        if not path.startswith(("schemas/", "encoders/architectures/", "vision/towers/"))
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in named.items() if times > 1] == []


def test_mlx_and_fastapi_stay_in_their_rooms() -> None:
    rooms = {
        "mlx": MLX_ROOMS,
        "mlx_lm": MLX_ROOMS,
        "mlx_vlm": ("vision/towers/",),
        "fastapi": FASTAPI_ROOMS,
        "starlette": FASTAPI_ROOMS,
    }
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        for name in imports(tree)
        if not path.startswith(rooms.get(name.split(".")[0], ("",)))
        or (name.split(".")[0] in {"mlx", "mlx_lm", "transformers"} and path in WITHOUT_MLX)
    ]
    assert not wrong


def described(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, and the strings that describe its constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(node.body):
                match before, after:
                    case (
                        ast.Assign() | ast.AnnAssign(),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield text


def test_docstrings_begin_with_a_verb_or_a_noun_phrase() -> None:
    wrong = [
        f"{path.relative_to(BACKEND)}: {text.partition(chr(10))[0]}"
        for path in sorted((BACKEND / "mlx_manager").rglob("*.py"))
        for text in described(ast.parse(path.read_text()))
        if RIDDLES.match(text)
    ]
    assert not wrong


def test_functions_are_short() -> None:
    wrong = [
        f"{path}: {node.name} has {length} lines"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not wrong


def test_only_the_three_top_levels_catch_everything() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and path not in CATCH_ALL
        if node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
    ]
    assert not wrong


def test_the_readme_tells_of_settings_as_they_are() -> None:
    readme = (BACKEND.parent / "README.md").read_text()
    found = re.search(r"<!-- settings: .*? -->\n(.*?)\n<!-- end of settings -->", readme, re.DOTALL)
    assert found is not None
    _, _, *lines = found[1].splitlines()
    rows = (
        f"| `{row.variable}` | {configuration.default(row)} | {row.text} |"
        for row in TABLE.values()
    )
    assert lines
    assert set(lines) <= set(rows)


def test_the_page_of_settings_is_up_to_date() -> None:
    written = (BACKEND.parent / "docs" / "configuration.md").read_text()
    assert written == configuration.page(), (
        "run: python -m mlx_manager.configuration > docs/configuration.md"
    )


def test_every_dependency_is_pinned_to_what_the_tests_ran_on() -> None:
    project = tomllib.loads((BACKEND / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=;~! ]", wanted)[0] for group in groups for wanted in group}
    constraints = (BACKEND.parent / "constraints.txt").read_text()
    assert names <= set(re.findall(r"^([a-z0-9-]+)==", constraints, re.MULTILINE))


PAGES = [
    page
    for folder in (
        ".",
        "docs",
        "benchmarks",
        "backend",
        "backend/mlx_manager/demo_model",
        "backend/mlx_manager/demo_vision_model",
    )
    for page in sorted((BACKEND.parent / folder).glob("*.md"))
]
NAMES_FROM = (".", "backend", "backend/tests/mlx_server", "backend/mlx_manager/mlx_server")
"""Where the paths that pages name begin, besides the page's own folder."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_pages_link_to_is_there():
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith(("https://", "http://")):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.name}: {link}")
    assert not wrong


def test_the_files_that_pages_name_are_there():
    wrong = []
    for page in PAGES:
        named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|toml|yml))`", page.read_text())
        for name in named:
            roots = [page.parent, *(BACKEND.parent / root for root in NAMES_FROM)]
            if not any((root / name).exists() for root in roots):
                wrong.append(f"{page.name}: {name}")
    assert not wrong
