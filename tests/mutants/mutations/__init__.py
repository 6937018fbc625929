"""Planted bugs, one file per package. ``MUTATIONS`` lists all of them."""

from __future__ import annotations

from tests.mutants.mutations import (
    divergence,
    elastic_data,
    finishing,
    hangs,
    incidents,
    jobs,
    leadership,
    local_sgd,
    mesh,
    one_copy,
    probation,
    quorum,
    retries,
    spares,
    worker,
)

MUTATIONS = leadership.MUTATIONS + quorum.MUTATIONS + jobs.MUTATIONS + mesh.MUTATIONS + worker.MUTATIONS
MUTATIONS += local_sgd.MUTATIONS + retries.MUTATIONS + elastic_data.MUTATIONS + spares.MUTATIONS
MUTATIONS += probation.MUTATIONS + finishing.MUTATIONS + divergence.MUTATIONS + one_copy.MUTATIONS
MUTATIONS += hangs.MUTATIONS + incidents.MUTATIONS
