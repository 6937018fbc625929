"""Where a lighthouse listens unless something else is given, and the TLS files of a client."""

DEFAULT_PORT = 29510
DEFAULT_LIGHTHOUSE = f"http://127.0.0.1:{DEFAULT_PORT}"

TLS_FILES = {
    "tls_cert": "Certificate to show (PEM), where the lighthouse wants one.",
    "tls_key": "Its key (PEM), if it is not in the same file.",
    "tls_ca": "CA (PEM) that the lighthouse's certificate must come from.  [default: those of the system]",
}
