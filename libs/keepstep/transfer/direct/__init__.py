"""Transfer of live state from group to group over HTTP."""
