"""The latest drafter, from those who train it to those who generate: whole, newer, or nothing."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from tlt.distributed import mailbox as mailbox_module
from tlt.distributed.mailbox import Mailbox, connect_mailbox


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(mailbox_module, "PIECE_BYTES", 10)
    return HashStore()


def test_what_is_received_is_what_was_sent_last_and_each_only_once(store: Store) -> None:
    sender, other, reader = Mailbox(store), Mailbox(store), Mailbox(store)
    assert reader.receive() is None
    for index, (who, payload) in enumerate([(sender, bytes(range(256))), (other, b"-"), (sender, b"\0" * 25)]):
        if index:
            who.send(b"replaced before anyone looked")
        who.send(payload)
        assert reader.receive() == payload
        assert reader.receive() is None
        assert who.receive() is None, "its own"
    assert other.receive() == b"\0" * 25


def test_a_message_that_is_replaced_while_it_is_read_is_nothing_and_the_next_one_arrives(store: Store) -> None:
    sender, reader = Mailbox(store), Mailbox(store)
    sender.send(b"a message of three pieces")
    store.delete_key("data/1/1")
    assert reader.receive() is None
    sender.send(b"another")
    assert reader.receive() == b"another"


def test_an_older_message_that_arrives_late_is_not_taken_for_news(store: Store) -> None:
    reader = Mailbox(store)
    for text in (b"first", b"second"):
        Mailbox(store).send(text)
    assert reader.receive() == b"second"
    store.set("latest", "1/1")
    assert reader.receive() is None


def test_what_was_replaced_does_not_stay_in_the_store(store: Store) -> None:
    sender = Mailbox(store)
    for _ in range(5):
        sender.send(b"twenty bytes of text")
    assert store.num_keys() == 4, "the counter, the name of the latest, its two pieces"


def test_a_message_larger_than_the_servers_limit_travels_between_connections() -> None:
    server = TCPStore("127.0.0.1", 0, 1, True)
    payload = bytes(range(256)) * (9 * 2**20 // 256)
    sender, reader = connect_mailbox(server, "drafter"), Mailbox(PrefixStore("mailbox/drafter", server))
    sender.send(payload)
    deadline = time.monotonic() + 60
    while (found := reader.receive()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == payload
