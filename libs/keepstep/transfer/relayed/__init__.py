"""Transfer of live state through relays, with other joiners as further sources."""
