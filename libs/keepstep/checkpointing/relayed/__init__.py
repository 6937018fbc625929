"""Move live state through relays, with other joiners as further sources."""
