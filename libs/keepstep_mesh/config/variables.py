"""Meaning of environment variables, except those of the flags of services; source of ``docs/reference.md``."""

from __future__ import annotations

from collections.abc import Mapping

OF_CLIENTS: Mapping[str, str] = {
    "KEEPSTEP_LIGHTHOUSE": "`http://host:port` (`https` with TLS) of the lighthouse; several separated by commas",
    "KEEPSTEP_JOB": "the job; default: `default`",
    "KEEPSTEP_TOKEN": "bearer token, if the lighthouse wants one; also needed between groups",
    "KEEPSTEP_TOKEN_FILE": "file that holds the token, read again when it changes",
    "KEEPSTEP_TLS_CA": "CA (PEM) that the lighthouse's certificate must come from; default: those of the system",
    "KEEPSTEP_TLS_CERT": "client certificate (PEM), if the lighthouse wants one",
    "KEEPSTEP_TLS_KEY": "its key (PEM), if it is not in the same file",
    "KEEPSTEP_OTEL": "what [OpenTelemetry](telemetry.md) gets of a trainer or service, with commas between: `step`, "
    "`quorum`, `reconfigure`, `heal`, `all-reduce`, `commit`, `logs`, or `all`; default: nothing",
}
"""Of trainers, of commands that ask a lighthouse, and of services where they register."""
OF_TRAINERS: Mapping[str, str] = {
    "KEEPSTEP_TIMEOUT_SEC": "limit of a collective, a commit vote, a heal without progress, in seconds",
    "KEEPSTEP_QUORUM_TIMEOUT_SEC": "limit of the wait for a quorum, in seconds",
    "KEEPSTEP_CONNECT_TIMEOUT_SEC": "limit of reaching the lighthouse and the group's rank 0 at the start, in seconds",
    "KEEPSTEP_QUORUM_RETRIES": "how often a quorum that timed out is asked for again before the step fails",
    "KEEPSTEP_MANAGER_PORT": "port of the group server on rank 0; default: any free one",
    "KEEPSTEP_UPLINK_BYTES_PER_SECOND": "most that a process sends of its state, such as `1e9`; default: no limit",
    "KEEPSTEP_PREFLIGHT": "[checks of the machine](operating.md#check-a-machine-before-it-joins) before a group joins, "
    "one a line, such as `builtin`; default: none",
    "KEEPSTEP_RETRY_ALLREDUCE": "1: groups that lose another one in a step reduce their gradients again and commit it",
    "KEEPSTEP_NCCL_MEMBERS": "how groups on NCCL change their members: `torch` (its own `reconfigure`), `rebuild`, or "
    "`auto`, which is `torch` where torch has it; equal in all groups",
    "KEEPSTEP_DURABLE_EVERY": "number of steps between two durable checkpoints; 0: never",
    "KEEPSTEP_DURABLE_RELAYS": "addresses of the relays that store durable checkpoints, separated by commas; "
    "default: those registered with the lighthouse",
    "KEEPSTEP_DURABLE_COPIES": "number of relays that store each durable checkpoint",
    "KEEPSTEP_DURABLE_NEWEST_WINS": "1: a durable checkpoint that waits for an upload is replaced by a newer one",
    "KEEPSTEP_RESUME": "1: a job without a live state begins with its newest durable checkpoint; 0: at step 0; "
    "default with durable checkpoints: 1",
    "KEEPSTEP_RESUME_WAIT_SEC": "how long a resume waits for relays that may have a newer durable checkpoint",
    "KEEPSTEP_STEP_LOG": "file that gets a JSON line for each step committed, discarded or healed; "
    "`keepstep check-history` reads it",
    "KEEPSTEP_CHAOS": "folder for sockets at which the process accepts faults inside it from `keepstep chaos`; also of "
    "services; default: none",
    "KEEPSTEP_SPARES": "how many groups of the job stand by; they are part of NUM_REPLICA_GROUPS",
    "KEEPSTEP_NOTICE_SEC": "seconds from SIGTERM in which a spare may take the place of the group; default: it "
    "leaves at once",
    "KEEPSTEP_DOMAIN": "failure domain of a member of a job with one copy, such as a rack (the name of its host)",
    "KEEPSTEP_NAME_FILE": "file to which the group writes its incarnation; `keepstep run` sets it, to ask for bans",
    "KEEPSTEP_IMPORTS": "folder for the list of what a trainer has imported; `keepstep run` sets it, for warm starts",
    "KEEPSTEP_WATCHDOG_TIMEOUT_SEC": "ends the process when a deadline's callback takes longer than these seconds (30)",
}
OF_LAUNCHERS: Mapping[str, str] = {
    "REPLICA_GROUP_ID": "number of the group: 1 is called `r1`",
    "NUM_REPLICA_GROUPS": "how many groups the job has, spares included; its first quorum waits for the others",
    "RANK": "rank in the group",
    "WORLD_SIZE": "ranks of the group",
    "MASTER_ADDR": "host of the group's store",
    "MASTER_PORT": "its port; one for each group",
    "TORCHELASTIC_RESTART_COUNT": "how often the group was restarted",
    "TORCHELASTIC_USE_AGENT_STORE": "`True`: the launcher serves the store, not rank 0",
}
"""Variables that torchrun and ``keepstep run`` set."""
OF_SERVICES: Mapping[str, str] = {
    "KEEPSTEP_WORKER_TOKEN": "the token of the role `worker`; beats the file, as the next two",
    "KEEPSTEP_SERVICE_TOKEN": "of the role `service`",
    "KEEPSTEP_ADMIN_TOKEN": "of the role `admin`",
    "KEEPSTEP_ETCD_PASSWORD": "of the user in `--store etcd://...?user=NAME`",
    "KEEPSTEP_ETCD_PASSWORD_FILE": "file that holds it; beats the variable before",
}
