"""What runs on nodes in the tests: `flow.py receive|send|echo|ask|count|shoot ...`; each prints a line of JSON."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # of the machine's limits
# At 1 Gbit/s 4 and 16 ms: a process may wait that long for its turn on a busy machine. At 10 Mbit/s 0.4 s to the end.
SEND_BYTES, RECEIVE_BYTES = 1 << 19, 1 << 21


def receive(seconds: str, flows: str = "1") -> object:
    """Payload of `flows` TCP connections together: bits per second once they have found their pace, bytes in all."""
    server = socket.create_server(("0.0.0.0", 5001), backlog=64)
    server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
    print("listening", flush=True)
    connections = [server.accept()[0] for _ in range(int(flows))]
    received = [0] * len(connections)

    def read(index: int) -> None:
        buffer = bytearray(1 << 20)
        while count := connections[index].recv_into(buffer):
            received[index] += count

    readers = [threading.Thread(target=read, args=(index,)) for index in range(len(connections))]
    for reader in readers:
        reader.start()
    time.sleep(0.3)
    before, start = sum(received), time.monotonic()
    time.sleep(float(seconds))
    after, end = sum(received), time.monotonic()
    congestion = connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    for connection in connections:
        connection.send(b".")
    for reader in readers:
        reader.join()
    return {"rate": (after - before) * 8 / (end - start), "bytes": sum(received), "congestion": congestion}


def send(address: str) -> object:
    """Fill a TCP connection until the other side says that it has seen enough."""
    data = bytes(1 << 16)
    with socket.create_connection((address, 5001)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BYTES)
        while not select.select([connection], (), (), 0)[0]:
            connection.send(data)
        connection.recv(1)  # closing with something unread would be a reset
    return "enough"


def echo() -> object:
    """Send back every datagram."""
    served = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    served.bind(("0.0.0.0", 5002))
    print("listening", flush=True)
    while True:
        data, peer = served.recvfrom(2048)
        served.sendto(data, peer)


def ask(address: str, times: str, wait: str) -> object:
    """Seconds there and back of each of `times` datagrams; None for one that was not back after `wait` seconds."""
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asking.settimeout(float(wait))
    round_trips: list[float | None] = []
    for number in range(int(times)):
        start = time.perf_counter()
        try:
            asking.sendto(str(number).encode(), (address, 5002))
            while int(asking.recv(2048)) != number:
                pass
            round_trips.append(time.perf_counter() - start)
        except OSError:
            round_trips.append(None)
    return round_trips


def count(seconds: str) -> object:
    """How many datagrams came until none came for `seconds`."""
    served = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    served.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    served.bind(("0.0.0.0", 5002))
    print("listening", flush=True)
    datagrams = 0
    try:
        while True:
            served.recv(2048)
            served.settimeout(float(seconds))
            datagrams += 1
    except TimeoutError:
        return datagrams


def shoot(address: str, packets: str) -> object:
    """Send datagrams, paced so that no queue is too short for them."""
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range(int(packets)):
        out.sendto(bytes(100), (address, 5002))
        if number % 20 == 19:
            time.sleep(0.001)
    return int(packets)


if __name__ == "__main__":
    act = {"receive": receive, "send": send, "echo": echo, "ask": ask, "count": count, "shoot": shoot}[sys.argv[1]]
    print(json.dumps(act(*sys.argv[2:])), flush=True)
