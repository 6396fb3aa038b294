from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.errors import InvalidSettings
from mlx_manager.mlx_server.models.settings import (
    NEVER,
    ModelsFile,
    Recipe,
    SamplingDefaults,
    makers_sampling,
    read_models_file,
)


def read(folder: Path, text: str) -> ModelsFile:
    (folder / "models.toml").write_text(text)
    return read_models_file(folder / "models.toml")


def test_no_file_says_nothing():
    models = read_models_file(None)
    assert models.allows("whatever")
    assert models.of("whatever").recipe == Recipe()
    assert models.of("whatever").ttl is None


def test_every_setting_of_a_model_is_read(tmp_path: Path):
    models = read(
        tmp_path,
        """
        allow = ["owner/*", "support"]

        [models."owner/big"]
        aliases = ["gpt-4*", "big"]
        pinned = true
        preload = true
        ttl = "never"
        context_length = 4096
        weights = "keep"
        kv_bits = 8
        draft_model = "owner/small"
        mtp = "off"
        sampling = { temperature = 0.7, top_p = 0.9, top_k = 40, min_p = 0.05 }

        [models.support]
        base = "owner/big"
        adapter = "adapters/support"
        ttl = "1.5h"
        [models.support.sampling]
        presence_penalty = -1
        frequency_penalty = 0.5
        repetition_penalty = 1.1
        """,
    )
    big, support = models.of("owner/big"), models.of("support")
    assert models.aliases() == (("gpt-4*", "owner/big"), ("big", "owner/big"))
    assert (big.pinned, big.preload, big.ttl) == (True, True, NEVER)
    assert big.recipe == Recipe(None, None, 4096, "keep", "owner/small", kv_bits=8, mtp="off")
    assert big.sampling.given() == {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    assert support.recipe == Recipe("owner/big", tmp_path / "adapters/support")
    assert (support.pinned, support.preload, support.ttl) == (False, False, 5400)
    assert support.sampling == SamplingDefaults(
        presence_penalty=-1, frequency_penalty=0.5, repetition_penalty=1.1
    )
    assert models.of("unnamed").recipe == Recipe()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ('"90s"', 90), ('"30m"', 1800), ('"2 h"', 7200)],
)
def test_a_time_has_a_unit_or_is_in_seconds(tmp_path: Path, text: str, seconds: float):
    assert read(tmp_path, f"[models.a]\nttl = {text}").of("a").ttl == seconds


@pytest.mark.parametrize(
    ("base", "meant"),
    [("owner/name", "owner/name"), ("./m", "{folder}/m"), ("../m", "{folder}/../m"), ("/m", "/m")],
)
def test_paths_start_in_the_files_folder(tmp_path: Path, base: str, meant: str):
    found = read(tmp_path, f'[models.a]\nbase = "{base}"').of("a").base
    assert found == meant.format(folder=tmp_path)


def test_a_path_in_a_home_that_nobody_has_is_named(tmp_path: Path):
    with pytest.raises(InvalidSettings, match=r"base: .*the home folder ~nobody-here is unknown"):
        read(tmp_path, '[models.a]\nbase = "~nobody-here/m"')


def test_who_is_allowed(tmp_path: Path):
    models = read(tmp_path, 'allow = ["owner/*", "small"]')
    assert all(models.allows(name) for name in ("owner/a", "owner/b", "small"))
    assert not any(models.allows(name) for name in ("other/a", "smaller", "owner"))
    assert not read(tmp_path, "allow = []").allows("small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alow = []", r"models.toml: alow is no setting; allowed are allow, models\.$"),
        ("allow = 3", "allow: must be a list, not 3"),
        ("[models]\na = 3", "models.a: must be a table, not 3"),
        ("[models.a]\nttl = -1", 'models.a.ttl: must be seconds, a text such as "90s"'),
        ('[models.a]\nttl = "soon"', "models.a.ttl: must be seconds.*'soon'"),
        ("[models.a]\nttl = true", "models.a.ttl: must be seconds"),
        (
            '[models."b/c"]\nweights = "8bit"',
            r"""models\."b/c"\.weights: must be 'auto', 'keep' or 'dequantize', not '8bit'""",
        ),
        (
            '[models."b/c"]\nkv_bits = 4',
            r"""models\."b/c"\.kv_bits: must be 16 or 8, not 4""",
        ),
        ("[models.a]\nnope = 1", "models.a.nope is no setting; allowed are base, adapter, context"),
        ("[models.a]\npinned = 1", "models.a.pinned: must be true or false, not 1"),
        (
            '[models.a]\nspeculation = "on"',
            "models.a.speculation: must be 'auto' or 'off', not 'on'",
        ),
        ('[models.a]\npinned = "yes"', "models.a.pinned: must be true or false"),
        (
            "[models.a]\ncontext_length = 0",
            "models.a.context_length: must be greater than or equal",
        ),
        (
            "[models.a]\nsampling = { temprature = 1 }",
            "models.a.sampling.temprature is no setting; allowed are temperature, top_p",
        ),
        (
            "[models.a]\nsampling = { temperature = 3, top_k = 1.5 }",
            "temperature: must be less than or equal to 2, not 3; models.a.sampling.top_k",
        ),
        (
            "[models.a]\nsampling = { repetition_penalty = 0 }",
            "repetition_penalty: must be greater than 0, not 0",
        ),
        (
            "[models.a]\nsampling = { repetition_penalty = inf, top_p = nan }",
            "top_p: must be a finite number, not nan; .*repetition_penalty: .*finite.*, not inf",
        ),
        ('[models.a]\naliases = [""]', "models.a.aliases.0"),
        (
            '[models.a]\naliases = ["x"]\n[models.b]\naliases = ["x"]',
            "models.b.aliases: 'x' stands for 'a' already",
        ),
        ('[models.a]\naliases = ["b"]\n[models.b]', "'b' is a model's own name"),
        (
            '[models.a]\nbase = "~nosuch/x"',
            r"models\.a\.base: the home folder ~nosuch is unknown: set HOME",
        ),
        ('[models.a]\nadapter = "~nosuch/x"', r"models\.a\.adapter: the home folder ~nosuch"),
        (f'[models.a]\nbase = "{"x" * 300}"', r"a\.base: must be a path that can.*name too long"),
        (f'[models.a]\nadapter = "{"x" * 300}"', r"a\.adapter: must be a path.*name too long"),
        ('[models.a]\nbase = "\\u0000"', r"models\.a\.base: must have no control characters"),
        ('[models.a]\nadapter = "b\\n"', r"models\.a\.adapter: must have no control characters"),
        ('[models.a]\nadapter = ""', r"models\.a\.adapter: must not be empty"),
        ('[models."a\\n"]', r'models\."a\\n": must have no control characters'),
        ('[models.a]\naliases = ["\\u001b[2J"]', r"a\.aliases\.0: must have no control characters"),
        ('allow = ["a\\r"]', r"allow\.0: must have no control characters"),
        ('[models.a]\ndraft_model = "b"\nmtp = "c"', r"models\.a\.mtp names an MTP head beside"),
        ("models = ", "models.toml is not TOML: "),
        ("[models.a]\n[models.a]", "models.toml is not TOML: "),
        (f"allow = {'[' * 5000}{']' * 5000}", "models.toml is not TOML: its .* too deeply"),
        (f"models = {'{a = ' * 5000}1{'}' * 5000}", "models.toml is not TOML: its .* too deeply"),
        (f"models.a{'.a' * 5000} = 1", r"models\.a\.a is no setting"),
        (f"allow = [{'[' * 100}{']' * 100}]", r"allow\.0: must be a valid string"),
    ],
)
def test_what_can_not_be_is_named_with_file_and_key_and_what_may_be(
    tmp_path: Path, text: str, message: str
):
    with pytest.raises(InvalidSettings, match=message) as refusal:
        read(tmp_path, text)
    assert str(tmp_path / "models.toml") in refusal.value.message


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path):
    with pytest.raises(InvalidSettings, match=r"gone.toml can't be read: No such file"):
        read_models_file(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSettings, match=r"binary.toml is not TOML"):
        read_models_file(tmp_path / "binary.toml")


TOML_VALUES = st.one_of(
    st.booleans().map(lambda value: str(value).lower()),
    st.integers(-(2**70), 2**70).map(str),
    st.floats(allow_nan=False).map(lambda x: "inf" if x in (1e400,) else repr(x)),
    st.text("abc\\\"'*/", max_size=5).map(lambda text: f"'''{text}'''"),
    st.sampled_from(["[]", "[1, 'a']", "{}", "{a = 1}", "1979-05-27", "nan", "'never'", "''"]),
)
KEYS = st.sampled_from(
    [
        "base",
        "adapter",
        "context_length",
        "weights",
        "kv_bits",
        "aliases",
        "pinned",
        "preload",
        "ttl",
        "sampling",
        "sampling.top_p",
    ]
)


@given(st.dictionaries(KEYS, TOML_VALUES, max_size=4))
def test_any_table_is_read_or_refused_with_its_reason(tables: dict[str, str]):
    lines = "\n".join(f"{key} = {value}" for key, value in tables.items())
    with tempfile.TemporaryDirectory() as folder, suppress(InvalidSettings):
        assert list(read(Path(folder), f"[models.a]\n{lines}\n").models) == ["a"]


@pytest.mark.parametrize(
    ("text", "expected", "said"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}', {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ""),
        ('{"repetition_penalty": 1.05, "min_p": null, "max_new_tokens": 9}', {"repetition_penalty": 1.05}, ""),
        ('{"temperature": "hot", "top_p": 0.8}', {"top_p": 0.8}, "temperature 'hot' is not used"),
        ('{"temperature": 3}', {}, "temperature 3 is not used: Input should be less than or equal to 2"),
        ("[]", {}, "generation_config.json is not a JSON object. It is not used."),
        ("{", {}, "It is not used."),
    ],
)  # fmt: skip
def test_what_the_makers_draw_by_is_read_as_far_as_it_can_be(
    text: str,
    expected: dict[str, float],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    (tmp_path / "generation_config.json").write_text(text)
    assert makers_sampling(tmp_path) == expected
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_makers_may_say_nothing(tmp_path: Path):
    assert makers_sampling(tmp_path) == {}


def test_a_model_may_be_on_other_machines(tmp_path: Path):
    models = read(
        tmp_path,
        """
        [models.big]
        url = "http://studio:8000/v1/"
        key_env = "STUDIO_KEY"
        remote_model = "org/name"
        kind = "embedding"
        timeout = "2m"
        [models.twins]
        url = ["http://a", "https://[::1]:9/deep/v1"]
        """,
    )
    big, twins = models.of("big"), models.of("twins")
    assert big.url == ("http://studio:8000/v1",)
    assert (big.key_env, big.remote_model, big.kind) == ("STUDIO_KEY", "org/name", "embedding")
    assert big.timeout == 120
    assert twins.url == ("http://a/v1", "https://[::1]:9/deep/v1")


@pytest.mark.parametrize(
    "url",
    [
        '""',
        "[]",
        "3",
        '"studio:8000"',
        '"ftp://studio/v1"',
        '"file:///etc/passwd"',
        '"http://"',
        '"http://studio:99999"',
        '"http://user:word@studio/v1"',
        '"http://studio/v1?key=1"',
        '"http://studio/v1#a"',
        '"http://stu dio/v1"',
        '"http://studio/v1\\n"',
        '["http://a", "http://a/v1/"]',
    ],
)
def test_what_is_no_address_of_a_machine_is_refused(tmp_path: Path, url: str):
    with pytest.raises(InvalidSettings, match=r"models\.big\.url"):
        read(tmp_path, f"[models.big]\nurl = {url}\n")


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        *(("models.big.ttl", '"5m"'), ("models.big.pinned", "true"), ("models.big.base", '"x"')),
        *(("models.big.context_length", "9"), ("models.big.weights", '"keep"')),
        *(("models.big.preload", "true"), ("models.big.adapter", '"a"')),
        *(("models.big.key_env", '"A-B"'), ("models.big.timeout", '"never"')),
        *(("models.big.timeout", "0"), ("models.big.kind", '"speech"')),
        *(("models.small.key_env", '"A"'), ("models.small.timeout", "9")),
        *(("models.small.remote_model", '"a"'), ("models.small.kind", '"text"')),
        *(("models.brief.context_length", "9"), ("models.brief.adapter", '"a"')),
        *(("models.brief.remote_model", '"a"'), ("models.brief.weights", '"keep"')),
    ],
)
def test_a_setting_that_does_not_go_with_a_models_place_is_refused(
    tmp_path: Path, setting: str, given: str
):
    tables = {"big": 'url = "http://a"', "brief": 'base = "big"', "small": 'aliases = ["tiny"]'}
    _, name, key = setting.split(".")
    tables[name] += f"\n{key} = {given}"
    text = "\n".join(f"[models.{model}]\n{lines}" for model, lines in tables.items())
    with pytest.raises(InvalidSettings, match=setting.replace(".", r"\.")):
        read(tmp_path, text)
