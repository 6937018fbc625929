"""A state dict: its description, its bytes, its parts by rank, copies of it, and its restoration.

* ``pack_layout`` describes a state; ``values/`` has the kinds of its leaves.
* ``state_manifest`` and ``state_bytes`` hash and join its bytes.
* ``staging``, ``early_copy``, and ``device_copies`` copy it to host memory.
* ``restoring`` builds it again.
* ``flattening``, ``local_parts``, ``planning``, ``staged_parts``, and ``pack`` divide it between ranks.
"""
