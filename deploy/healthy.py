"""Health checks of containers: exit code 0, or a sentence.

``healthy.py SERVICE PORT``: the service on this port says that it can do its work. ``healthy.py trainer``: a lighthouse
knows the replica group of this container, and it is not gone.
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
    """With TLS it shows the service its own certificate, and has no need to look at the one that it gets."""
    certificate, key = (os.environ.get(f"KEEPSTEP_{name.upper()}_TLS_{part}") for part in ("CERT", "KEY"))
    if certificate is None:
        get(f"http://127.0.0.1:{port}/readyz", None)
        return
    context = ssl._create_unverified_context()
    context.load_cert_chain(certificate, key)
    get(f"https://127.0.0.1:{port}/readyz", context)


def trainer() -> None:
    group = Path(tempfile.gettempdir(), "group").read_text()
    path = f"/v1/jobs/{os.environ.get('KEEPSTEP_JOB', 'default')}/replicas/r{group}"
    token = Path(os.environ["KEEPSTEP_TOKEN_FILE"]).read_text().split()[0]
    context = ssl.create_default_context(cafile=os.environ.get("KEEPSTEP_TLS_CA"))
    if "KEEPSTEP_TLS_CERT" in os.environ:
        context.load_cert_chain(os.environ["KEEPSTEP_TLS_CERT"], os.environ.get("KEEPSTEP_TLS_KEY"))
    trouble: Exception = OSError("KEEPSTEP_LIGHTHOUSE is empty")
    for address in os.environ["KEEPSTEP_LIGHTHOUSE"].split(","):
        try:
            found = json.loads(get(address + path, context, Authorization=f"Bearer {token}"))
        except OSError as error:
            trouble = error
            continue
        if found["state"] in ("gone", "absent"):
            sys.exit(f"the group is {found['state']}")
        return
    raise trouble


try:
    trainer() if sys.argv[1] == "trainer" else service(*sys.argv[1:])
except OSError as error:
    sys.exit(str(error))
