"""The lighthouse on the wire: sessions with workers, and requests that are malformed or too large."""
