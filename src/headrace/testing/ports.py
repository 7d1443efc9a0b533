"""Free ports that stay free while a killed broker is down.

Owns the choice of ports for brokers of tests. Invariant: they lie below the range that the kernel takes from for
outgoing connections: of that range, some client would take a port in the moment its broker is gone. Called by
`broker` and `cluster`.
"""

import contextlib
import random
import socket

PORT_LOWEST = 12_000
PORT_ATTEMPTS_MAX = 50


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different free ports; OSError when there are none."""
    ports: list[int] = []
    for _ in range(PORT_ATTEMPTS_MAX * count):
        if len(ports) == count:
            return ports
        port = random.randint(PORT_LOWEST, _highest())
        if port not in ports and _is_free(host, port):
            ports.append(port)
    raise OSError(f"no {count} free ports on {host}")


def free_row(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many free ports in a row."""
    for _ in range(PORT_ATTEMPTS_MAX):
        first = random.randint(PORT_LOWEST, _highest() - count)
        if all(_is_free(host, port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} free ports in a row on {host}")


def _highest() -> int:
    highest = 32_767
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/sys/net/ipv4/ip_local_port_range") as range_file,
    ):
        highest = int(range_file.read().split()[0]) - 1
    return highest if highest > PORT_LOWEST + PORT_ATTEMPTS_MAX else 65_535


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
