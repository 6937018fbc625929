"""State machines of keepstep, driven by hand or in virtual time, and a double of the Manager."""
