"""Move live state from group to group over HTTP."""
