from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_manager.mlx_server.config import AccessRules, KeyLimits
from mlx_manager.mlx_server.errors import AuthenticationFailed, InvalidSettings, MLXManagerError
from mlx_manager.mlx_server.services.accounts import Accounts
from mlx_manager.mlx_server.services.keys import (
    Keyring,
    add_key,
    fingerprint,
    make_secret,
    read_entries,
    read_keys,
    remove_key,
)


def test_a_key_is_found_by_its_secret_and_only_its_hash_is_kept(tmp_path: Path):
    file = tmp_path / "in" / "keys.toml"
    alice = add_key(file, "alice", {"requests_per_minute": 5, "priority": 2})
    bob = add_key(file, "bob", {})
    assert alice not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    server = KeyLimits(requests_per_minute=60, max_concurrent=8)
    ring = Keyring(read_keys(AccessRules(keys_file=file, limits=server)))
    found = ring.find(alice)
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(5, None, 8, 64, 2))
    found = ring.find(bob)
    assert found is not None
    assert (found.name, found.limits) == ("bob", server)
    assert ring.find(alice[:-1]) is None
    assert ring.find(fingerprint(alice)) is None
    assert ring.find("") is None


def test_a_key_that_was_removed_is_unknown_and_what_its_owner_wrote_beside_it_stays(tmp_path: Path):
    file = tmp_path / "keys.toml"
    secret = add_key(file, "alice", {})
    add_key(file, "bob", {})
    file.write_text("# ours\n" + file.read_text())
    remove_key(file, "alice")
    assert set(read_entries(file)) == {"bob"}
    assert file.read_text().startswith("# ours\n")
    assert Keyring(read_keys(AccessRules(keys_file=file))).find(secret) is None
    with pytest.raises(MLXManagerError, match="no key named 'alice'"):
        remove_key(file, "alice")


def test_secrets_are_long_and_never_the_same():
    made = {make_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(secret.startswith("sk-mlx-") and len(secret) >= 50 for secret in made)


def test_names_are_taken_once_and_must_be_names(tmp_path: Path):
    file = tmp_path / "keys.toml"
    add_key(file, "alice", {})
    with pytest.raises(MLXManagerError, match="named 'alice' already"):
        add_key(file, "alice", {})
    for wrong in ("", "a b", "../up", "x" * 65, "line\nbreak"):
        with pytest.raises(MLXManagerError, match="name"):
            add_key(file, wrong, {})
    with pytest.raises(MLXManagerError, match="max_concurrent"):
        add_key(file, "carol", {"max_concurrent": 0})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[alice]\nsha256 = 'abc'", "alice.sha256"),
        ("[alice]\nsha256 = '%s'\nrequest_per_minute = 1" % ("0" * 64), "request_per_minute"),
        ("sk-mlx-secret", "keys.toml is not TOML: Expected '='"),
        (f"a = {'[' * 5000}{']' * 5000}", "keys.toml is not TOML: its lists or tables are nested"),
        ("", "no key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, content: str, said: str):
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(MLXManagerError, match=said):
        read_keys(AccessRules(keys_file=file))


def test_a_file_that_is_missing_is_refused_with_what_makes_one(tmp_path: Path):
    with pytest.raises(MLXManagerError, match="mlx-manager key add"):
        read_keys(AccessRules(keys_file=tmp_path / "keys.toml"))


def test_no_key_of_the_file_may_pass_for_the_environments(tmp_path: Path):
    file = tmp_path / "keys.toml"
    secret = add_key(file, "default", {})
    found = Keyring(read_keys(AccessRules(keys_file=file))).find(secret)
    assert found is not None
    assert found.name == "default"
    with pytest.raises(InvalidSettings, match=r"MLX_SERVER_API_KEY is named 'default'.*keys\.toml"):
        read_keys(AccessRules(key="another secret", keys_file=file))


@pytest.mark.parametrize("environment", [True, False])
def test_one_key_under_two_names_is_refused(tmp_path: Path, environment: bool):
    file = tmp_path / "keys.toml"
    secret = add_key(file, "alice", {})
    if not environment:
        file.write_text(file.read_text() + f'[bob]\nsha256 = "{fingerprint(secret)}"\n')
    with pytest.raises(InvalidSettings, match=r"keys\.toml: '\w+' and '\w+' have the same key"):
        read_keys(AccessRules(key=secret if environment else None, keys_file=file))


def test_the_last_key_may_be_taken_from_a_server_that_runs(tmp_path: Path):
    file = tmp_path / "keys.toml"
    secret = add_key(file, "alice", {})
    accounts = Accounts(AccessRules(keys_file=file))
    assert accounts.find(secret).key.name == "alice"
    remove_key(file, "alice")
    accounts.know(accounts.read())
    for presented in (secret, None):
        with pytest.raises(AuthenticationFailed):
            accounts.find(presented)
    with pytest.raises(MLXManagerError, match="there is no key in"):
        Accounts(AccessRules(keys_file=file))


def test_keys_that_are_added_at_once_all_stay(tmp_path: Path):
    file = tmp_path / "keys.toml"
    names = [f"key-{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: add_key(file, name, {}), names))
    assert set(read_entries(file)) == set(names)


def test_what_a_link_leads_to_is_changed_and_the_link_stays(tmp_path: Path):
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "keys.toml", tmp_path / "link.toml"
    link.symlink_to(file)
    add_key(link, "alice", {})
    add_key(link, "bob", {})
    assert link.is_symlink()
    assert set(read_entries(file)) == {"alice", "bob"}
