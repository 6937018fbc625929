"""The command ``keepstep``: start a job, ask its services and order them, demonstrate, and test faults."""
