"""Network interface by which ranks of several machines reach each other over gloo.

gloo listens on the address that the host's name resolves to. Debian puts ``127.0.1.1 NAME`` into /etc/hosts, containers
often 127.0.0.1: peers on other machines would then connect to themselves. ``GLOO_SOCKET_IFNAME`` names an interface
in place of that.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from lightning_megatron.machine.finding import Finding

VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"
"""Address reserved for documentation: it has no host, so its route is that to other networks."""


def addresses_of(host: str) -> list[str]:
    """Addresses that a name resolves to, in gloo's order; empty if it does not resolve."""
    with suppress(OSError):
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    return []


def own_interfaces() -> dict[str, str]:
    """Interface of each address of this machine, by address; empty where the system does not say."""
    found: dict[str, str] = {}
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                row = fcntl.ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found[socket.inet_ntoa(row[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(IPv6Address(int(digits, 16)))] = name
    return found


def source_address(host: str) -> str | None:
    """Address of this machine from which packets to a host would go; ``None`` without a route. Nothing is sent."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """True for an address by which a machine reaches only itself."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def unreachable(own: Sequence[str], interfaces: Mapping[str, str]) -> str | None:
    """Address at which gloo would listen in vain for other machines; ``None`` if it is fine.

    Args:
        own: addresses of the host's name.
        interfaces: interface of each address of this machine.
    """
    local = next((address for address in own if is_loopback(address) or address in interfaces), None)
    if local is not None and not is_loopback(local):
        return None
    return local or next(iter(own), "no address")


def choose_interface(main: str, interfaces: Mapping[str, str]) -> str | None:
    """Interface that leads to the machine where ranks meet; ``None`` if none is known.

    Args:
        main: name or address of that machine, which may be this one.
        interfaces: interface of each address of this machine.
    """
    source = source_address(main)
    if source is None or (is_loopback(source) and not is_loopback(main)):  # this machine, under its own name
        source = source_address(_ELSEWHERE)
    if source is not None and is_loopback(source):
        return next((name for address, name in interfaces.items() if is_loopback(address)), None)
    return interfaces.get(source or "")


def gloo_interface(main: str = _ELSEWHERE, variables: Mapping[str, str] = os.environ) -> tuple[str | None, Finding]:
    """Interface to name to gloo where the host's name does not lead to this machine, ``None`` otherwise; and why.

    Args:
        main: machine where ranks meet.
        variables: environment variables; a value of the user stays as it is.
    """
    host, interfaces, subject = socket.gethostname(), own_interfaces(), "address of this machine"
    if VARIABLE in variables:
        return None, Finding(subject, f"{VARIABLE}={variables[VARIABLE]}")
    if not interfaces or (bad := unreachable(addresses_of(host), interfaces)) is None:
        return None, Finding(subject, f"that of {host}")
    resolved = f"{host} resolves to {bad}, by which other machines cannot reach it"
    name = choose_interface(main, interfaces)
    if name is None:
        advice = f"{resolved}: in a job on several machines set {VARIABLE} to a network interface"
        return None, Finding(subject, bad, advice, harmful=False)
    return name, Finding(subject, f"{name} in a job on several machines, since {resolved}")
