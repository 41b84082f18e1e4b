"""The long link of bench.connections: when packets arrive, told with time by hand."""

from __future__ import annotations

import random
import struct

import pytest
from bench.long_link import QUEUE_S, Direction, Quality, Turns, flow_of

MBIT_BYTES = 125_000


def packet(port: int, num_bytes: int = 1000) -> bytes:
    head = bytes([0x45]) + bytes(11) + bytes([10, 78, 0, 1, 10, 78, 0, 2]) + struct.pack("!HH", port, 5700)
    return head.ljust(num_bytes, b"\0")


def test_a_flow_is_known_by_addresses_and_ports() -> None:
    assert flow_of(packet(1)) == flow_of(packet(1, 2000))
    assert flow_of(packet(1)) != flow_of(packet(2))


def test_packets_pass_one_after_the_other_and_not_more_than_may_wait() -> None:
    turns = Turns(mbit=1.0)
    assert turns.next(10.0, MBIT_BYTES // 100) == pytest.approx(10.01)
    assert turns.next(10.0, MBIT_BYTES // 50) == pytest.approx(10.03)
    assert turns.next(10.0, 1) is None
    assert turns.next(10.03 - QUEUE_S, 0) == pytest.approx(10.03)


def test_capped_flows_share_a_link_that_carries_more_than_each() -> None:
    direction = Direction(Quality(delay_s=1.0, rate_mbit=2.0, flow_mbit=1.0), random.Random(0))
    first, second = (direction.arrival(packet(port, MBIT_BYTES // 100), 0.0) for port in (1, 2))
    assert first == pytest.approx(1.0 + 0.010 + 0.005)
    assert second == pytest.approx(1.0 + 0.010 + 0.010)


def test_so_many_packets_are_lost() -> None:
    direction = Direction(Quality(delay_s=0.0, rate_mbit=1e9, loss=0.25), random.Random(0))
    lost = sum(direction.arrival(packet(1), float(i)) is None for i in range(1000))
    assert 200 < lost < 300
