"""Digests and keys: when two pages of tokens have one name."""

import os
import subprocess
import sys

import numpy as np
import pytest

import jaxpaged
from jaxpaged.paging import Key
from jaxpaged.paging.digests import as_tokens, hash_pages, root_digest
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_digests_do_not_depend_on_the_hash_seed():
    code = (
        "import sys, types, numpy as np\n"
        "sys.modules['jaxpaged'] = types.ModuleType('jaxpaged')\n"  # without its __init__, which imports JAX
        f"sys.modules['jaxpaged'].__path__ = {list(jaxpaged.__path__)!r}\n"
        "from jaxpaged.paging import Key\n"
        "from jaxpaged.paging.digests import as_tokens, hash_pages, root_digest\n"
        "keys = [Key('adapter', 'x'), Key('image', b'i', 5)]\n"
        "print(hash_pages(np.arange(12, dtype=np.int32), 4, parent=root_digest(4), keys=keys).tolist())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([Key("a", "bc")], [Key("ab", "c")]),
        ([Key("n", 1)], [Key("n", "1")]),
        ([Key("n", b"1")], [Key("n", "1")]),
        ([Key("adapter", "x")], [Key("tenant", "x")]),
        ([Key("i", "x", 0)], [Key("i", "x", 1)]),
        ([Key("i", "x", 0), Key("i", "y", 0)], [Key("i", "xy", 0)]),
        ([], [Key("", "")]),
    ],
)
def test_keys_that_differ_in_any_part_never_share_a_page(one, other):
    pages = make_pages()
    add_committed(pages, "a", PROMPT, keys=one)
    assert pages.prefix.match(PROMPT, keys=one) == 16
    assert pages.prefix.match(PROMPT, keys=other) == 0


def test_keys_count_from_their_position_on_and_in_any_order():
    pages = make_pages()
    keys = [Key("image", b"1", 9), Key("image", b"2", 8)]
    add_committed(pages, "a", PROMPT, keys=keys)
    assert pages.prefix.match(PROMPT) == 8
    assert pages.prefix.match(PROMPT, keys=keys[::-1]) == 16


def test_digest_of_a_page_names_all_before_it():
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    first, second = hash_pages(tokens, 4, parent=root_digest(4)).tolist()
    again = hash_pages(tokens[4:], 4, parent=np.array(first, "<u8").tobytes(), first_page=1)
    assert again.tolist() == [second]
    assert hash_pages(tokens[4:], 4, parent=root_digest(4)).tolist() != [second]


@pytest.mark.parametrize("position", [200, 259, 260, 263, 264, 1028])
def test_keys_far_into_a_prompt_part_it_from_their_page_on(position):
    """Prompts are hashed in parts of 64 pages and more: the pages of each part are counted from the first one."""
    tokens = list(range(1200))
    pages = make_pages(700)
    add_committed(pages, "a", tokens, keys=[Key("tenant", "x", position)])
    assert pages.prefix.match([*tokens, 0], keys=[Key("tenant", "x", position)]) == 1200
    assert pages.prefix.match([*tokens, 0], keys=[Key("tenant", "y", position)]) == position // 4 * 4
    assert pages.prefix.match([*tokens, 0]) == position // 4 * 4


def test_fork_carries_the_keys_of_its_parent():
    pages = make_pages()
    keys = [Key("tenant", "x")]
    pages.add("a", PROMPT[:2], keys=keys)
    pages.fork("a", "b")
    pages.free("a")
    pages.append("b", 18)
    pages.commit("b", PROMPT)
    assert (pages.prefix.match([*PROMPT, 0]), pages.prefix.match([*PROMPT, 0], keys=keys)) == (0, 20)


def test_keys_of_none_raise_by_name():
    with pytest.raises(
        TypeError, match=r"^`keys` must be a list of Key; got None\. Leave it out where there are none\.$"
    ):
        make_pages().add("a", PROMPT, keys=None)


@pytest.mark.parametrize("given", [[0, 2**31 - 1], range(3), np.array([7], np.uint64), np.zeros(3, np.int8), [], ()])
def test_tokens_are_int32_from_0_to_the_largest(given):
    tokens = as_tokens(given)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(given)


@pytest.mark.parametrize("bad", [-1, 2**31, 2**63, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("others", [[], [0], [2**63]])
def test_token_out_of_range_is_named(bad, others):
    with pytest.raises(ValueError, match=rf"must be in 0 \.\. 2\*\*31 - 1; got ({bad}|{2**63})\. Cut padding"):
        as_tokens([bad, *others])


@pytest.mark.parametrize("bad", [[0.5], [True], ["1"], [None], np.array([1.0])])
def test_tokens_that_are_no_integers_are_refused(bad):
    with pytest.raises(TypeError, match=r"^`token_ids` must be integers; got "):
        as_tokens(bad)
