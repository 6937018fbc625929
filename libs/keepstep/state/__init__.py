"""A state dict: its description, its bytes, its parts by rank, copies of it, and its restoration.

* ``pack_layout`` describes a state; ``values/`` has the kinds of its leaves.
* ``pack`` reads its bytes; ``state_manifest`` and ``state_bytes`` hash and join them.
* ``staging``, ``early_copy``, and ``device_copies`` copy it to host memory.
* ``restoring`` builds it again.
* ``flattening`` and ``local_parts`` divide it into parts, and ``staged_parts`` copies them.
"""
