"""The text of a served agent: every reply is given once, also if the model begins it again."""

from retinue.core.events import Body, Delta, Event, Message, RunEnded, TurnStarted
from retinue.protocol.notices import NoticeFold, TextPiece


def make_event(seq: int, body: Body) -> Event:
    return Event(seq, "t", 0, "/main", "main", 0.0, body)  # type: ignore[arg-type]


def make_delta(text: str, offset: int, turn: int = 1) -> Delta:
    return Delta("t", 0, "/main", "main", text, turn=turn, offset=offset)


BEGIN = make_event(1, TurnStarted(1))


def fold(*items: Event | Delta) -> list[TextPiece]:
    notices = NoticeFold("main")
    return [piece for item in items for piece in notices.apply(item) if isinstance(piece, TextPiece)]


def read_parts(pieces: list[TextPiece]) -> dict[int, str]:
    """Return the parts as a client has them in the end."""
    parts: dict[int, str] = {}
    for piece in pieces:
        parts[piece.part] = piece.text if piece.is_new else parts[piece.part] + piece.text
    return parts


def test_a_reply_that_begins_again_is_shown_at_once_in_the_place_of_the_first() -> None:
    attempts = BEGIN, make_delta("I was", 0), make_delta("I am ", 0), make_delta("back.", 5)
    assert read_parts(fold(*attempts)) == {1: "I am back."}
    pieces = fold(*attempts, make_event(2, Message("I am back.", final=True)))
    assert read_parts(pieces) == {1: "I am back."}
    assert [piece.is_last for piece in pieces] == [False, False, False, True]


def test_a_reply_whose_last_attempt_was_missed_takes_the_place_of_the_first() -> None:
    pieces = fold(BEGIN, make_delta("I was", 0), make_event(2, Message("I am back.", final=True)))
    assert read_parts(pieces) == {1: "I am back."}


def test_missed_deltas_come_with_the_event_and_nothing_comes_twice() -> None:
    whole = make_event(2, Message("\u27e6plan\u27e7 one two three", final=True))
    ended = make_event(3, RunEnded("done", "one two three", 1))
    texts = ["\u27e6plan\u27e7 ", "one ", "two ", "three"]
    offsets = [sum(map(len, texts[:number])) for number in range(4)]
    deltas = [make_delta(text, offset) for text, offset in zip(texts, offsets, strict=True)]
    for missed in range(16):
        heard = [delta for number, delta in enumerate(deltas) if not missed >> number & 1]
        pieces = fold(BEGIN, *heard, whole, ended)
        assert read_parts(pieces) == {1: "\u27e6plan\u27e7", 2: "one two three"}
        assert sum(piece.is_last for piece in pieces) == 2


def test_several_replies_of_one_turn_are_parts_of_their_own() -> None:
    replies = make_event(2, Message("Looking.")), make_event(3, Message("Found it.", final=True))
    assert read_parts(fold(BEGIN, make_delta("Look", 0), *replies)) == {1: "Looking.", 2: "Found it."}


def test_deltas_that_come_after_the_whole_reply_are_not_shown_again() -> None:
    """The log shows a delta at once, but not before the first event of the run is written: then it can be late."""
    whole = make_event(2, Message("one two", final=True))
    late = make_delta("one ", 0), make_delta("two", 4)
    assert read_parts(fold(BEGIN, whole, *late)) == {1: "one two"}
    assert read_parts(fold(BEGIN, late[0], whole, *late)) == {1: "one two"}
    again = make_event(3, TurnStarted(2)), make_delta("three", 0, turn=2)
    assert read_parts(fold(BEGIN, whole, late[0], *again)) == {1: "one two", 2: "three"}
