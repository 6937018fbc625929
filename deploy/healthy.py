"""Check the health of a container: exit with 0, or with 1 and the reason on standard error.

``healthy.py SERVICE PORT`` asks the service on this port whether it is ready. ``healthy.py trainer`` asks a lighthouse
whether the replica group of this container is connected, and ``healthy.py group`` whether the group of
``REPLICA_GROUP_ID`` takes part in the steps.
"""

import json
import os
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 3


def get(url: str, context: ssl.SSLContext | None, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:
        return answer.read()


def service(name: str, port: str) -> None:
    """Ask ``/readyz``. With TLS, present the service's own certificate, and skip verification on loopback."""
    certificate, key = (os.environ.get(f"KEEPSTEP_{name.upper()}_TLS_{part}") for part in ("CERT", "KEY"))
    if certificate is None:
        get(f"http://127.0.0.1:{port}/readyz", None)
        return
    context = ssl._create_unverified_context()
    context.load_cert_chain(certificate, key)
    get(f"https://127.0.0.1:{port}/readyz", context)


def replica(group: str) -> dict:
    """Ask the lighthouses for the state of the group ``r<group>``."""
    path = f"/v1/jobs/{os.environ.get('KEEPSTEP_JOB', 'default')}/replicas/r{group}"
    token = Path(os.environ["KEEPSTEP_TOKEN_FILE"]).read_text().split()[0]
    context = ssl.create_default_context(cafile=os.environ.get("KEEPSTEP_TLS_CA"))
    if "KEEPSTEP_TLS_CERT" in os.environ:
        context.load_cert_chain(os.environ["KEEPSTEP_TLS_CERT"], os.environ.get("KEEPSTEP_TLS_KEY"))
    trouble: Exception = OSError("KEEPSTEP_LIGHTHOUSE is empty")
    for address in os.environ["KEEPSTEP_LIGHTHOUSE"].split(","):
        try:
            return json.loads(get(address + path, context, Authorization=f"Bearer {token}"))
        except OSError as error:
            trouble = error
    raise trouble


def trainer() -> None:
    """Fail unless the group of this container is connected."""
    state = replica(Path(tempfile.gettempdir(), "group").read_text())["state"]
    if state in ("gone", "absent"):
        sys.exit(f"the group is {state}")


def group() -> None:
    """Fail unless the group of ``REPLICA_GROUP_ID`` trains in the quorum or is a spare."""
    found = replica(os.environ["REPLICA_GROUP_ID"])
    trains = found["member"] and found["state"] in ("asking", "training")
    if not trains and found["state"] != "spare":
        sys.exit(f"the group is {found['state']}")


try:
    {"trainer": trainer, "group": group}.get(sys.argv[1], lambda: service(*sys.argv[1:]))()
except OSError as error:
    sys.exit(str(error))
