"""Names of blocks: equal for equal prefixes in every process, and for no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.disk.names import FILE, PLAIN, BlockName, PrefixChain, Space

PAGE = 4
TOKENS = st.lists(st.integers(0, 3), min_size=3 * PAGE, max_size=3 * PAGE)


def digests(content: list[int], names: dict[int, str] | None = None) -> list[bytes]:
    chain = PrefixChain(PAGE, names or {})
    return [chain.at(content, number) for number in range(len(content) // PAGE)]


@given(TOKENS, TOKENS)
def test_prefixes_have_one_name_exactly_where_they_are_equal(a: list[int], b: list[int]) -> None:
    for number, (one, other) in enumerate(zip(digests(a), digests(b), strict=True), 1):
        assert (one == other) == (a[: number * PAGE] == b[: number * PAGE])


@given(TOKENS)
def test_a_sequence_that_grows_keeps_its_names(tokens: list[int]) -> None:
    chain, content = PrefixChain(PAGE, {}), tokens[:PAGE]
    first = chain.at(content, 0)
    content += tokens[PAGE:]
    assert [first, chain.at(content, 1), chain.at(content, 2)] == digests(tokens)


def test_pictures_are_named_by_their_digests_and_not_by_numbers_of_one_process() -> None:
    content = [1, 2, -1, -1, -1, 3, -2, -2]
    again = [1, 2, -7, -7, -7, 3, -4, -4]
    named = digests(content, {-1: "cat", -2: "dog"})
    assert digests(again, {-7: "cat", -4: "dog"}) == named
    assert digests(content, {-1: "dog", -2: "cat"})[0] != named[0]
    assert digests(content, {-1: "cat", -2: "cow"})[0] == named[0]
    assert digests(content, {-1: "cat", -2: "cow"})[1] != named[1]
    # Another place of the same picture.
    assert digests([1, 2, 2, -1, -1, 3, -2, -2], {-1: "cat", -2: "dog"})[0] != named[0]


def test_a_space_depends_on_all_facts_and_has_a_folder_of_a_sound_name() -> None:
    one = Space("owner/../model", {"revision": "a", "page": 16})
    assert one.digest == Space("another name", {"page": 16, "revision": "a"}).digest
    assert one.digest != Space("owner/../model", {"revision": "b", "page": 16}).digest
    assert "/" not in one.folder
    assert not one.folder.startswith(".")
    assert Space("///", {}).folder.startswith("model-")


def test_a_file_s_name_says_what_it_is() -> None:
    found = FILE.fullmatch(BlockName(b"\x01" * 20, PLAIN, 0, 16).file)
    assert found is not None
    assert (bytes.fromhex(found[1]), found[2]) == (b"\x01" * 20, PLAIN)
