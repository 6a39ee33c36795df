"""Ids of trees: unique wherever they are made, and different from the first letter on."""

import os
import re

from retinue.supervisor.tree import new_tree_id


def test_ids_are_unique_and_differ_in_their_first_letters() -> None:
    ids = [new_tree_id() for _ in range(20_000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-z]{12}", each) for each in ids)
    assert len({each[:2] for each in ids}) > 1000
    assert all(len({each[place] for each in ids}) == 32 for place in range(12))


def test_a_forked_process_makes_other_ids() -> None:
    """A generator that is copied with its process would make the same ones."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_tree_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() != new_tree_id()
