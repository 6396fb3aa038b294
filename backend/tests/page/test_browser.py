"""The page in a real browser: `frontend/tests/scenarios.mjs` against real servers.

pytest tests/page -k stopped                     # one scenario
SHOTS=/tmp/shots pytest tests/page               # keeps pictures, to be looked at
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_hub import fake_hub
from live import live_server
from scripted_model import call, make_scripted_model
from tiny_vision import make_seeing_model

from mlx_manager import demo_model

FRONTEND = Path(__file__).parents[3] / "frontend"
SOURCE = (FRONTEND / "tests" / "scenarios.mjs").read_text()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
LOOKS = ("light", "dark", "phone")
SCENARIOS = [
    *re.findall(r"^scenario\('([^']+)'", SOURCE, re.MULTILINE),
    *(f"{look}: every page can be read by all" for look in LOOKS),
]
KEY, TOKEN = re.findall(r"^export const (?:KEY|TOKEN) = '(.+)';$", SOURCE, re.MULTILINE)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None
    or shutil.which("node") is None
    or not (FRONTEND / "node_modules" / "playwright-core").is_dir(),
    reason="the page is driven by node, playwright-core and Chromium (scripts/page.sh)",
)

EVIL = """\
<img src=x onerror="window.harmed = 1"> and <script>window.harmed = 2</script> too
<svg onload="window.harmed=3"><a href="javascript:window.harmed=4">go</a></svg>

[press](javascript:window.harmed=5) ![spy](https://spy.example/?what=secret)
<iframe src="https://frame.example"></iframe><form action="https://form.example"><input></form>
<p style="position:fixed" id="app" class="shell">over all</p>

```html
<b onclick="window.harmed=6">code</b>
```

$\\href{javascript:window.harmed=7}{x}$ The end."""

WRITER = """\
# A heading

Some *words*, a [link](https://site.example/) and `code`.

| one | two |
|---|---|
| 1st | 2nd |

```python
def f(number: int) -> str:
    return "so" * number
```

Inline \\(a^2 + b^2\\) and in a line of its own:

$$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$

- [x] done
- [ ] to do"""


LONG = """\
Para with *stress* on `one` word, and then more of it so that lines wrap.

1. First item here
2. Second thing there

```python
print("again", 17 + 4)
```

"""


@dataclass(frozen=True, slots=True)
class Result:
    failure: str | None
    seconds: float


def make_models(folder: Path) -> Path:
    thinker = make_scripted_model(
        folder / "thinker",
        [call("calculate", expression="6 * 7"), "It is that."],
        without_tools=f"<think>\nHm, let me see.\n</think>\n\n{WRITER}",
    )
    # A template that drops the thinking of past answers tells that the model thinks.
    template = thinker / "chat_template.jinja"
    said = "(message.content or '')"
    template.write_text(template.read_text().replace(said, f"{said}.split('</think>')[-1]"))
    make_scripted_model(folder / "long", [], without_tools=LONG, endless=True)
    shutil.copytree(Path(demo_model.__file__).parent, folder / "spare")
    make_scripted_model(folder / "evil", [], without_tools=EVIL)
    make_seeing_model(folder / "seeing", "smolvlm")
    return folder


def drive(options: dict[str, Any], actions: dict[str, Callable[..., object]]) -> dict[str, Result]:
    """Run the scenarios and do what they ask for; return what came of each."""
    command = ["node", FRONTEND / "tests" / "drive.mjs", json.dumps(options)]
    results: dict[str, Result] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in map(json.loads, process.stdout):
            if "do" in line:
                answer = actions[line["do"]](*line["given"])
                process.stdin.write(f"{json.dumps(answer)}\n")
                process.stdin.flush()
            else:
                results[line["name"]] = Result(line["failure"], line["seconds"])
                print(f"{line['seconds']:6.1f} s  {line['name']}")
    return results


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("page")
    models_file = folder / "models.toml"
    models_file.write_text('# of the owner\n[models.thinker]\nttl = "1h"\n')
    held = threading.Event()
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    with (
        fake_hub(Path(demo_model.__file__).parent) as hub,
        pytest.MonkeyPatch.context() as patch,
        live_server(folder / "closed.txt", api_key=KEY, admin_token=TOKEN) as closed,
    ):
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(folder / "hub"))
        settings = {
            **{"models_dir": make_models(folder / "models"), "models_file": models_file},
            "speculation": "on",
        }
        with live_server(folder / "open.txt", offline=False, hf_cache=True, **settings) as plain:
            options = {
                "chromium": CHROMIUM,
                "only": wanted,
                "shots": os.environ.get("SHOTS"),
                "servers": {"open": plain.url, "closed": closed.url},
            }
            actions = {
                "tell": print,
                "hold": lambda: setattr(hub, "held", held),
                "release": held.set,
                "models_file": models_file.read_text,
            }
            found = drive(options, actions)
    for log in ("open.txt", "closed.txt"):
        assert "Traceback" not in (folder / log).read_text()
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_page(results: dict[str, Result], name: str) -> None:
    assert name in results, "the driver ended before"
    assert results[name].failure is None, results[name].failure
