"""Every route of a lighthouse: who may ask it, and a body that it takes."""

from __future__ import annotations

from typing import Any

ACCESS = {
    ("GET", "/healthz"): "anybody",
    ("GET", "/readyz"): "anybody",
    ("GET", "/openapi.json"): "anybody",
    ("GET", "/"): "anybody",
    ("GET", "/metrics"): "worker service admin",
    ("GET", "/v1/cluster"): "worker service admin",
    ("PUT", "/v1/services/{kind}/{name}"): "service admin",
    ("DELETE", "/v1/services/{kind}/{name}"): "service admin",
    ("GET", "/v1/jobs"): "worker service admin",
    ("GET", "/v1/jobs/{job}"): "worker service admin",
    ("PATCH", "/v1/jobs/{job}"): "admin",
    ("DELETE", "/v1/jobs/{job}"): "admin",
    ("GET", "/v1/jobs/{job}/quorum"): "worker service admin",
    ("GET", "/v1/jobs/{job}/replicas"): "worker service admin",
    ("GET", "/v1/jobs/{job}/replicas/{replica_id}"): "worker service admin",
    ("GET", "/v1/jobs/{job}/events"): "worker service admin",
    ("GET", "/v1/jobs/{job}/transfers"): "worker service admin",
    ("GET", "/v1/jobs/{job}/stacks"): "admin",
    ("GET", "/v1/jobs/{job}/incidents"): "worker service admin",
    ("GET", "/v1/jobs/{job}/incidents/{number}"): "admin",
    ("POST", "/v1/jobs/{job}/incidents"): "worker admin",
    ("GET", "/v1/jobs/{job}/session"): "worker admin",
    ("GET", "/v1/lighthouses/session"): "service admin",
    ("GET", "/v1/lighthouses/events"): "service admin",
    ("POST", "/v1/jobs/{job}/verify"): "admin",
    ("POST", "/v1/jobs/{job}/reopen"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/evict"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/drain"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/replace"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/readmit"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/straggler"): "service admin",
}

ONE = "/v1/jobs/{job}/replicas/{replica_id}"
SERVICE = "/v1/services/{kind}/{name}"
BODIES: dict[tuple[str, str], Any] = {
    ("PUT", SERVICE): {"address": "http://a:1", "details": {"gib": 64, "full": None}},
    ("PATCH", "/v1/jobs/{job}"): {"min_replicas": 1, "drain_straggler_after": 1},
    ("POST", "/v1/jobs/{job}/verify"): None,
    ("POST", "/v1/jobs/{job}/reopen"): None,
    ("POST", "/v1/jobs/{job}/incidents"): {"replica_id": "r1:1", "rank": 0, "code": 1},
    ("POST", f"{ONE}/straggler"): {"steps": 1, "seconds": 0.5, "median_seconds": 0.1},
    ("POST", f"{ONE}/evict"): {"reason": "x", "ban_seconds": 5},
    ("POST", f"{ONE}/drain"): {"reason": "x"},
    ("POST", f"{ONE}/replace"): {"reason": "x"},
    ("POST", f"{ONE}/readmit"): None,
    ("DELETE", SERVICE): None,
}
"""Of every order but the last, in an order in which they can be carried out."""
LAST = ("DELETE", "/v1/jobs/{job}")
SESSIONS = {("GET", "/v1/jobs/{job}/session"), ("GET", "/v1/lighthouses/session")}


def url_of(path: str, job: str = "job", replica_id: str = "r1") -> str:
    return path.format(job=job, replica_id=replica_id, kind="relay", name="relay-1", number=1)
