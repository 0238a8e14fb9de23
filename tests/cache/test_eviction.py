"""The queue of victims against a dictionary, and that it does not grow with use."""

from __future__ import annotations

from random import Random

from octavo.cache.index.victims import SWEEP, VictimQueue


def test_the_lowest_rank_goes_first_whatever_was_replaced() -> None:
    rng, queue, slow = Random(0), VictimQueue(), dict[int, tuple[float, int]]()
    for turn in range(5000):
        node = rng.randrange(40)
        match rng.randrange(8):
            case 0:
                queue.withdraw(node)
                slow.pop(node, None)
            case 1:
                lowest = min(slow, key=slow.__getitem__) if slow else None
                found = queue.pop()
                assert (found[1] if found else None) == lowest
                slow.pop(lowest if lowest is not None else -1, None)
            case _:
                rank = float(rng.randrange(100))
                queue.put(node, rank)
                slow[node] = (rank, turn)


def test_using_the_same_nodes_again_and_again_takes_no_more_memory() -> None:
    queue = VictimQueue()
    for time in range(10_000):
        queue.put(time % 10, float(time))
        assert len(queue) <= 2 * 10 + SWEEP
    popped = [queue.pop() for _ in range(11)]
    assert [found and found[1] for found in popped] == [*range(10), None]
