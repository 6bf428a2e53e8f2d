"""Says what is open about an address: who may call, and who can read along."""

import ipaddress


def is_local(address: str) -> bool:
    """Whether only this machine reaches it. A name counts as foreign unless it is localhost."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposure(address: str, has_tls: bool, asks_who: bool) -> str:
    """In words, or nothing. `asks_who`: callers must prove who they are."""
    if is_local(address):
        return ""
    complaints = []
    if not asks_who:
        complaints.append("whoever reaches it may call")
    if not has_tls:
        complaints.append("what it says and is told crosses the network unencrypted")
    return f"{address} is open: {', and '.join(complaints)}" if complaints else ""
