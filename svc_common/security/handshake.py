"""What a failed connection says of TLS, in words, with the settings to look at. The client library's, and services'."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """How a caller's own settings are called where it is set up."""

    tls: str
    ca: str
    certificate: str
    server_name: str


SERVICE = Settings("[tls] of both services", "tls.ca", "tls.certificate", "tls.server_name")
CLIENT = Settings(
    "--tls and --ca-file, NEOFLEX_CA_FILE, or Client(tls=...)",
    "--ca-file, NEOFLEX_CA_FILE, or Tls.ca_file",
    "--certificate-file and --key-file, NEOFLEX_CERTIFICATE_FILE and NEOFLEX_KEY_FILE, or Tls",
    "--server-name, NEOFLEX_SERVER_NAME, or Tls.server_name",
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a caller shows at an address."""

    speaks_tls: bool
    has_certificate: bool
    settings: Settings


def handshake_trouble(details: str, address: str, greeting: Greeting) -> str:
    """Of a call to `address` that ended with UNAVAILABLE and these `details` of gRPC's core; empty where they are about
    something else. Of a server that merely hangs up it can only be said what is likely.
    """
    settings = greeting.settings
    if "Failed to create security handshaker" in details:  # Before anything was sent.
        files = f"{settings.ca}; {settings.certificate}" if greeting.has_certificate else settings.ca
        wrong = ", or a key is not that of its certificate" if greeting.has_certificate else ""
        return f"no TLS with {address}: a file given here holds no PEM of the kind that it should{wrong}; see {files}"
    if "WRONG_VERSION_NUMBER" in details:
        return f"no TLS with {address}: the server speaks none; see {settings.tls}"
    if "Hostname Verification Check failed" in details:
        return f"no TLS with {address}: its certificate is for another name; see {settings.server_name}"
    if "CERTIFICATE_VERIFY_FAILED" in details and "has expired" in details:
        return f"no TLS with {address}: its certificate has expired"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"no TLS with {address}: its certificate does not come from a CA that is trusted here; see {settings.ca}"
    hangs_up = any(text in details for text in ("Socket closed", "Connection reset by peer"))
    if address.startswith("unix:") or not hangs_up or "failed to connect" not in details:
        return ""
    if not greeting.speaks_tls:
        return f"{address} hangs up at once: it is likely to speak TLS alone; see {settings.tls}"
    if not greeting.has_certificate:
        return (
            f"no TLS with {address}: it hangs up, likely for want of a client certificate; see {settings.certificate}"
        )
    return (
        f"no TLS with {address}: it hangs up, likely as the certificate shown has expired or does not come from a CA "
        f"that it trusts; see {settings.certificate}"
    )
