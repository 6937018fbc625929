"""State machines of keepstep, driven by hand or in virtual time."""
