"""Proposers that are asked in turn."""

from types import SimpleNamespace

from autotune.proposers.base import InTurn


class Given:
    """Proposes what it is given, None included."""

    def __init__(self, *proposals):
        self.proposals = list(proposals)

    def propose(self, history):
        return self.proposals.pop(0) if self.proposals else None


def history(*running):
    return SimpleNamespace(in_flight=frozenset(running))


def test_each_is_asked_until_it_has_nothing_more():
    proposer = InTurn([lambda: Given("a", "b"), lambda: Given(), lambda: Given("c")])
    assert [proposer.propose(history()) for _ in range(4)] == ["a", "b", "c", None]


def test_a_proposer_that_has_nothing_while_probes_run_is_asked_again():
    proposer = InTurn([lambda: Given("a", None, "b"), lambda: Given("c")])
    assert proposer.propose(history()) == "a"
    assert proposer.propose(history("a")) is None
    assert [proposer.propose(history()) for _ in range(2)] == ["b", "c"]
