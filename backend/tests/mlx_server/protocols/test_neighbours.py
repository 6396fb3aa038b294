from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import Message, Role, ToolCall
from mlx_manager.mlx_server.protocols.neighbours import merged

ROLES: list[Role] = ["system", "user", "assistant", "tool"]
MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(ROLES),
        st.sampled_from(["", "a", "b\n"]),
        reasoning=st.sampled_from([None, "", "hm"]),
        tool_calls=st.sampled_from([(), (ToolCall("1", "f", "{}"),)]),
    ),
    max_size=8,
)


@given(MESSAGES, st.frozensets(st.sampled_from(ROLES)))
def test_neighbours_become_one_and_nothing_is_lost(said: list[Message], roles: frozenset[Role]):
    found = list(merged(iter(said), roles))
    borders = list(pairwise(found))
    assert not [a for a, b in borders if a.role == b.role and a.role in roles]
    for role in ROLES:
        before = [message for message in said if message.role == role]
        after = [message for message in found if message.role == role]
        texts = ["\n".join(m.content for m in each if m.content) for each in (before, after)]
        thoughts = [
            "\n".join(m.reasoning or "" for m in each if m.reasoning) for each in (before, after)
        ]
        calls = [[call for m in each for call in m.tool_calls] for each in (before, after)]
        assert (texts[0], thoughts[0], calls[0]) == (texts[1], thoughts[1], calls[1])
        if role not in roles:
            assert before == after
