"""Run a script on a Ray cluster of several nodes on this machine: python -u ray_nodes.py NODES SCRIPT

Each node has one CPU, or as many as ``CPUS`` says. Lines on standard input change the cluster:

    drain NODE SECONDS     tell Ray that the node ends in so many seconds
    end NODE               end the node
    add                    start a node more
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

CPUS = int(os.environ.get("CPUS", "1"))
NODE = {"num_cpus": CPUS, "object_store_memory": 80_000_000, "include_dashboard": False}
TRIES = 5


def obey(cluster: Cluster) -> None:
    """Execute the lines of standard input until its end."""
    for line in sys.stdin:
        order, *words = line.split()
        if order == "add":
            cluster._shutdown_at_exit = False  # else it sets signal handlers, which only the main thread may
            add_node(cluster)
            continue
        node, *seconds = words
        if order == "drain":
            client = ray._raylet.GcsClient(address=cluster.address)
            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            deadline_ms = round((time.time() + float(seconds[0])) * 1000)
            accepted, problem = client.drain_node(node, reason, "test", deadline_ms)
            print("drains" if accepted else f"does not drain: {problem}", node, flush=True)
        else:
            cluster.remove_node(next(one for one in cluster.worker_nodes if one.node_id == node))
            print("ended", node, flush=True)


def add_node(cluster: Cluster) -> None:
    """Start a node. Ray gives it 30 s, which are not enough on a busy machine."""
    for _ in range(TRIES - 1):
        try:
            cluster.add_node(**NODE)
        except Exception as error:  # noqa: BLE001  Ray raises no other class
            print("no node yet:", error, flush=True)
        else:
            return
    cluster.add_node(**NODE)


def main(nodes: int, script: str) -> None:
    """Start the cluster, run the script, stop the cluster."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(nodes - 1):
            add_node(cluster)
        ray.init(address=cluster.address)
        print("head", cluster.head_node.node_id, flush=True)
        threading.Thread(target=obey, args=(cluster,), daemon=True).start()
        runpy.run_path(script, run_name="__main__")
        ray.shutdown()
    finally:
        cluster.shutdown()


main(int(sys.argv[1]), sys.argv[2])
