"""Receipts of messages to runs at work, folded from the log."""

from retinue.core.events import Inbox, RunEnded, RunWaiting, TurnStarted
from retinue.log.receipts import Receipts
from tests.surfaces.printer.facts import ANNA, MAIN, Facts


def test_a_message_is_queued_then_delivered_at_a_turn_or_too_late() -> None:
    facts, receipts = Facts(), Receipts()
    said = [
        [(each.run, each.text, each.describe()) for each in receipts.apply(facts(who, body))]
        for who, body in [
            (MAIN, TurnStarted(1)),
            (MAIN, Inbox("faster", source="user")),
            (ANNA, Inbox("stop", source="asker")),
            (MAIN, Inbox("a child has ended", source="notice")),
            (MAIN, TurnStarted(2)),
            (MAIN, TurnStarted(3)),
            (ANNA, RunEnded("done", "x", 1)),
            (MAIN, RunWaiting()),
            (MAIN, Inbox("the next task", source="user")),
            (MAIN, TurnStarted(4)),
        ]
    ]
    queued = "queued: the run reads it at its next turn"
    assert said == [
        [],
        [(0, "faster", queued)],
        [(1, "stop", queued)],
        [],
        [(0, "faster", "delivered at turn 2")],
        [],
        [(1, "stop", "too late: the run ended before it read the message")],
        [],
        [],
        [],
    ]
